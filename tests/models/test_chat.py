"""Chat templates render as Hugging Face's do, cannot escape their sandbox, and fail with a TemplateError."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import ModelError, TemplateError
from kestrel.models.chat import ChatTemplate, load_chat_template
from kestrel.models.checkpoint import open_checkpoint

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(HELLO if messages is None else messages, **kwargs)


def test_the_default_model_speaks_chatml(smollm2: Path) -> None:
    template = open_checkpoint(smollm2).chat_template()
    assert template is not None
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert template.render(messages) == system + turn + "<|im_start|>assistant\n"
    assert template.render(messages, add_generation_prompt=False) == system + turn
    assert template.render(HELLO).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )


def test_special_tokens_and_keyword_arguments_reach_the_template() -> None:
    assert (
        render("{{ bos_token }}{{ enable_thinking }}{{ eos_token }}", enable_thinking=False) == "<s>False</s>"
    )


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hello\n"


def test_json_is_written_as_models_saw_it() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é>", "a": 1}) == '{"b": "<é>", "a": 1}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_tools_are_passed_on_or_none() -> None:
    source = "{% if tools %}{{ tools[0].name }}{% else %}none{% endif %}"
    assert render(source, tools=[{"name": "clock"}]) == "clock"
    assert render(source, tools=[]) == render(source) == "none"


def test_loop_controls_generation_marks_and_the_date_work() -> None:
    source = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "1"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[7].content }}", "failed: UndefinedError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "failed: SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed: SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.json }}", "failed: "),
        ("{% for i in range(10000000) %}{% endfor %}", "failed: OverflowError"),
    ],
)
def test_failures_and_attacks_are_template_errors(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(source)


def test_messages_are_not_changed_by_a_template() -> None:
    messages = [{"role": "user", "content": ["x"]}]
    with pytest.raises(TemplateError, match="SecurityError"):
        render("{{ messages[0].content.clear() }}", messages)
    assert messages == [{"role": "user", "content": ["x"]}]


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(ModelError, match="chat template, line 2: "):
        ChatTemplate("a\n{% if %}", {})


def test_a_template_file_replaces_the_checkpoint_s_and_keeps_its_special_tokens(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}>{{ messages[0].content }}", encoding="utf-8")
    assert load_chat_template(file, ChatTemplate("x", {"bos_token": "<s>"})).render(HELLO) == "<s>>Hello"
    assert load_chat_template(file, None).render(HELLO) == ">Hello"
    with pytest.raises(ModelError, match=r"nothing.jinja: .*check model.chat_template"):
        load_chat_template(tmp_path / "nothing.jinja", None)
