"""Promise: tools reach the chat template, and calls in an answer come out as tool calls, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.server.toolcalls import ToolCall, ToolCallReader, split_answer

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Riga", "n": [1, 2]}}\n</tool_call>'
HALF_A_PAIR = r'<tool_call>{"name": "f", "arguments": {"x": "\ud83d"}}</tool_call>'
READ = ToolCall("f", '{"city": "Riga", "n": [1, 2]}')


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("Hello", "Hello", []),
        (CALL, "", [READ]),
        (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.\n", [READ, READ]),
        (f"{CALL} done", "done", [READ]),
        ("<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "g"}</tool_call>', "", [ToolCall("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": "{}"}', "", [ToolCall("g", "{}")]),
        ('a <tool_call>{"name": "g", "argu', 'a <tool_call>{"name": "g", "argu', []),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>" + "[" * 3000, "<tool_call>" + "[" * 3000, []),
        (HALF_A_PAIR, HALF_A_PAIR, []),
    ],
)
def test_calls_are_told_apart_from_text(answer: str, content: str, calls: list[ToolCall]) -> None:
    assert split_answer([answer]) == (content, calls)
    assert split_answer(list(answer)) == (content, calls)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', "<", "tool", " x\n"])),
    st.data(),
)
def test_how_the_text_is_cut_makes_no_difference(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = split_answer([text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split_answer(pieces) == whole
    reader = ToolCallReader()
    calls = [item for piece in pieces for item in reader.push(piece)] + reader.flush()
    assert reader.num_calls == sum(isinstance(item, ToolCall) for item in calls) == len(whole[1])


# Shows the model so often how a call is written that even a small one goes on that way.
TEMPLATE = """
{%- for message in messages if message.role == "user" %}
{%- for city in ["Rome", "Oslo", "Bern", "Lima", "Cairo", "Tokyo"] %}
Question: What is the weather in {{ city }}?
Answer: <tool_call>
{"name": "{{ tools[0].function.name if tools else 'none' }}", "arguments": {"city": "{{ city }}"}}
</tool_call><|im_end|>
{%- endfor %}
Question: {{ message.content }}
Answer:
{%- endfor %}"""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
    }
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Riga?"}]


def test_a_model_calls_a_tool(start_server: Any, smollm2_words: tuple[str, ...], tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    server = start_server(*smollm2_words, f"model.chat_template={template}", "cache=off")

    def chat(**fields: Any) -> Any:
        return server.openai.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=48, tools=TOOLS, **fields
        )

    choice = chat().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Riga"}

    chunks = list(chat(stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    [streamed] = [each for delta in deltas for each in delta.tool_calls or ()]
    assert streamed.index == 0 and streamed.function.model_dump() == call.function.model_dump()
    assert "".join(delta.content or "" for delta in deltas).strip() == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    text = chat(tool_choice="none").choices[0].message
    assert text.tool_calls is None and "none" in text.content  # the template was not given them


def test_a_template_without_a_place_for_tools(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        server.openai.chat.completions.create(model="smollm2", messages=QUESTION, tools=TOOLS)
