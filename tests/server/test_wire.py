"""Promise: a request's fields are honoured, harmless by name, or refused by name; nothing is dropped silently."""

from typing import Any

import pytest
from pydantic import ValidationError

from kestrel.server.wire import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}

HARMLESS = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
}
NOT_USED = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
UNSUPPORTED = {"logit_bias": {"5": 1}}
CHAT_NOT_USED = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "reasoning_effort": None,
}
CHAT_UNSUPPORTED = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "modalities": ["audio"],
    "reasoning_effort": "low",
    "audio": {"voice": "x"},
    "web_search_options": {},
}


def refusals(kind: type[Any], body: dict[str, Any]) -> list[tuple[tuple[int | str, ...], str]]:
    """(place, message) of everything that is wrong with a body."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return [(error["loc"], error["msg"]) for error in caught.value.errors()]


def test_harmless_and_unused_fields_are_accepted() -> None:
    CompletionRequest.model_validate(COMPLETION | HARMLESS | NOT_USED | {"best_of": 1, "suffix": None})
    ChatRequest.model_validate(CHAT | HARMLESS | NOT_USED | CHAT_NOT_USED)


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(field: str) -> None:
    for kind, body in ((CompletionRequest, COMPLETION), (ChatRequest, CHAT)):
        [(place, message)] = refusals(kind, body | {field: UNSUPPORTED[field]})
        assert place == (field,) and message.startswith(f"{field} is not supported")


@pytest.mark.parametrize("field", CHAT_UNSUPPORTED)
def test_unsupported_chat_fields_are_refused_by_name(field: str) -> None:
    [(place, message)] = refusals(ChatRequest, CHAT | {field: CHAT_UNSUPPORTED[field]})
    assert place == (field,) and message.startswith(f"{field} is not supported")


def test_unknown_fields_are_refused() -> None:
    assert refusals(CompletionRequest, COMPLETION | {"temprature": 1})[0][0] == ("temprature",)
    assert refusals(ChatRequest, {"messages": [{"role": "user", "content": "x", "mood": "good"}]})[0][0] == (
        "messages",
        0,
        "mood",
    )


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], [])],
)
def test_one_prompt_as_text_or_token_ids(prompt: Any, read: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == read


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], None, 7, {}, "\ud800"])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusals(CompletionRequest, {"prompt": prompt})[0][0] == ("prompt",)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]}).messages[0].content
        == "ab"
    )
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    [(place, message)] = refusals(ChatRequest, {"messages": [{"role": "user", "content": [*parts, image]}]})
    assert place == ("messages", 0, "content") and "content[2] is of type 'image_url'" in message


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    message = ChatRequest.model_validate({"messages": [answer]}).messages[0]
    assert message.for_template() == {"role": "assistant", "content": "x"}


def test_an_answer_put_together_by_openai_s_client_can_be_sent_back() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": None}
    call = {"id": "call_1", "type": "function", "function": function, "index": 0}
    streamed = {"role": "assistant", "content": None, "parsed": None, "refusal": None, "tool_calls": [call]}
    message = ChatRequest.model_validate({"messages": [streamed]}).messages[0]
    assert message.for_template()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    assert "index" not in message.model_dump()["tool_calls"][0]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 100_000},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1] * 100_000}]},
        {"messages": [{"role": "user", "content": "x", **{f"x{n}": 1 for n in range(100_000)}}]},
        {f"x{n}": 1 for n in range(100_000)},
    ],
)
def test_a_body_with_countless_faults_is_refused_for_a_few_of_them(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(body)
    assert refused.value.error_count() < 5


@pytest.mark.parametrize("arguments", ["[" * 200_000, '{"a":' * 3_000 + "1" + "}" * 3_000])
def test_arguments_nested_without_end_reach_the_template_as_text(arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    message = ChatRequest.model_validate(body).messages[0]
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == arguments


def test_tool_calls_reach_the_template_with_their_arguments_as_an_object() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    first, second = ChatRequest.model_validate({"messages": messages}).messages
    function = {"name": "f", "arguments": {"a": [1]}}
    assert first.for_template() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert second.for_template() == {"role": "tool", "content": "7", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": "x", "tool_call_id": "1"},
        {
            "role": "user",
            "content": "x",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "x", "function": {"name": "f", "arguments": ""}}],
        },
    ],
)
def test_messages_that_contradict_themselves_are_refused(message: dict[str, Any]) -> None:
    assert refusals(ChatRequest, {"messages": [message]})[0][0][:2] == ("messages", 0)


def test_a_developer_message_is_a_system_message() -> None:
    body = {"messages": [{"role": "developer", "content": "x"}]}
    assert ChatRequest.model_validate(body).messages[0].for_template()["role"] == "system"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "0.5"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("seed", 2**63),
        ("stop", ""),
        ("n", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("kestrel", {"persist": False, "pin": True}),
        ("kestrel", {"persist": "no"}),
        ("stop", [1]),
        ("stop", "\ud800"),
        ("logprobs", 21),
        ("stream", "yes"),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused(field: str, value: Any) -> None:
    assert refusals(CompletionRequest, COMPLETION | {field: value})[0][0][:1] == (field,)


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (CompletionRequest, COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
        (CompletionRequest, COMPLETION | {"echo": True, "logprobs": 1, "n": 2}, "echo with logprobs"),
        (ChatRequest, CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (ChatRequest, CHAT | {"chat_template_kwargs": {"messages": []}}, "messages"),
        (ChatRequest, {"messages": []}, ""),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    kind: type[Any], body: dict[str, Any], named: str
) -> None:
    assert named in refusals(kind, body)[0][1]


def test_nothing_is_generated_on_request_of_a_completion_only() -> None:
    assert CompletionRequest.model_validate(COMPLETION | {"max_tokens": 0}).max_tokens == 0
    assert refusals(ChatRequest, CHAT | {"max_tokens": 0})[0][0] == ("max_tokens",)


def test_stop_is_one_string_or_several() -> None:
    for given, read in (("a", ["a"]), (["a", "b"], ["a", "b"]), (None, [])):
        assert CompletionRequest.model_validate(COMPLETION | {"stop": given}).stop == read
