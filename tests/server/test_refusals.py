"""Promise: every error has OpenAI's shape and a fitting status, and the server goes on."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def refused(response: Any, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape and the given status."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"} and error["message"]
    return error


@pytest.mark.parametrize("text", ["{", "", "nonsense", "[" * 50_000, '{"prompt": ' + "1" * 5000 + "}"])
def test_a_body_that_is_not_json(server: Any, text: str) -> None:
    response = server.http.post(COMPLETIONS, content=text, headers={"content-type": "application/json"})
    refused(response, 400)


def test_a_body_that_is_not_declared_json(server: Any) -> None:
    error = refused(server.http.post(COMPLETIONS, content=b'{"prompt": "a"}'), 400)
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {}, "prompt", "missing_field"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_field"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "unsupported_field"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "unknown_field"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0].type", "missing_field"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "unsupported_field"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "response_format",
            "unsupported_field",
        ),
    ],
)
def test_invalid_requests_name_the_field(
    server: Any, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    error = refused(server.http.post(path, json=body), 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert param.split(".")[-1] in error["message"]


def test_a_refusal_is_short_however_much_is_wrong(server: Any) -> None:
    error = refused(server.http.post(CHAT, json={"messages": HELLO, **{f"x{n}": 1 for n in range(90)}}), 400)
    assert error["code"] == "unknown_field" and "and 80 more" in error["message"]


def test_limits_of_the_server_are_named(server: Any) -> None:
    for body, named in (
        ({"prompt": "a", "n": 9}, "server.max_choices"),
        ({"prompt": "a", "stop": list("abcdefghijklmnopq")}, "server.max_stops"),
    ):
        assert named in refused(server.http.post(COMPLETIONS, json=body), 400)["message"]


@pytest.mark.parametrize("prompt", ["", [], [1_000_000], [-1], [2**40]])
def test_prompts_without_a_usable_token(server: Any, prompt: Any) -> None:
    refused(server.http.post(COMPLETIONS, json={"prompt": prompt}), 400)


def test_halves_of_surrogate_pairs(server: Any) -> None:
    headers = {"content-type": "application/json"}
    for body in (
        r'{"prompt": "\ud800"}',
        r'{"prompt": "a", "model": "\ud800"}',
        r'{"prompt": "a", "\ud800": 1}',
    ):
        refused(server.http.post(COMPLETIONS, content=body, headers=headers), 400)


def test_unknown_models(server: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        error = refused(server.http.post(path, json=body | {"model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found" and "smollm2" in error["message"]
    refused(server.http.get("/v1/models/org/other"), 404)
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-9")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context(server: Any, stream: bool) -> None:
    error = refused(server.http.post(COMPLETIONS, json={"prompt": [5] * 10_000, "stream": stream}), 413)
    assert error["code"] == "context_length_exceeded"
    assert "10000" in error["message"]


def test_a_body_larger_than_allowed(server: Any) -> None:
    body = json.dumps({"prompt": "a" * 2_000_000}).encode()
    headers = {"content-type": "application/json"}

    def pieces() -> Any:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    for content in (body, pieces()):  # with its length declared, and without
        error = refused(server.http.post(COMPLETIONS, content=content, headers=headers), 413)
        assert error["code"] == "body_too_large" and "200000 bytes" in error["message"]


def test_unknown_paths_and_methods(server: Any) -> None:
    refused(server.http.get("/v2/nothing"), 404)
    refused(server.http.get(COMPLETIONS), 405)


def test_the_openai_client_raises_its_own_errors(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        server.openai.completions.create(model="smollm2", prompt="a", logit_bias={"5": 1})
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="gpt-9", prompt="a")


def test_the_server_goes_on(server: Any) -> None:
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


FAILING = """
import sys
from kestrel.config import load_config
from kestrel.generation import Generation
from kestrel.server.start import serve

accept = Generation.accept

def fail_on_seven_tokens(self, logits):
    if self.request.max_tokens == 7 and self.stats().completion_tokens == len(self.request.tokens) - 1:
        raise MemoryError("out of memory, for the test")
    accept(self, logits)

Generation.accept = fail_on_seven_tokens
serve(load_config(sys.argv[1:]))
"""


def test_an_engine_failure_fails_its_own_request_only(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    server = start_server(*tiny_words, "cache=off", program=("-c", FAILING))
    error = refused(server.http.post(COMPLETIONS, json={"prompt": [50], "max_tokens": 7}), 500)
    assert (error["type"], error["code"]) == ("server_error", "engine_failure")
    assert "out of memory" not in error["message"] and "out of memory, for the test" in server.log
    body: dict[str, Any] = {"prompt": [50], "max_tokens": 7, "stream": True}
    refused(server.http.post(COMPLETIONS, json=body), 500)

    # Later than the first token the status is sent: the stream ends with the error instead of [DONE].
    stream = server.openai.completions.create(
        model="tiny", prompt=[50, 51, 52], max_tokens=7, logprobs=0, stream=True
    )
    texts = []
    with pytest.raises(openai.APIError, match="the engine failed"):
        for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert len(texts) == 2
    assert server.http.post(COMPLETIONS, json={"prompt": [50], "max_tokens": 8}).status_code == 200

    # Those who share steps with one that fails get their own answers.
    prompts = [[50 + n] for n in range(6)]
    alone = [
        server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=40) for prompt in prompts
    ]

    def together(prompt: list[int]) -> str:
        text: str = (
            server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=40).choices[0].text
        )
        return text

    def failing() -> int:
        status: int = server.http.post(
            COMPLETIONS, json={"prompt": [50, 51, 52], "max_tokens": 7}
        ).status_code
        return status

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(together, prompt) for prompt in prompts]
        failures = [pool.submit(failing) for _ in range(2)]
        assert [answer.result() for answer in answers] == [whole.choices[0].text for whole in alone]
        assert [failure.result() for failure in failures] == [500, 500]
