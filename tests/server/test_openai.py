"""Promise: the stock OpenAI client gets completions, chats and streams, with usage, log probabilities and stops."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.tokenizer import Tokenizer
from kestrel.server.wire import KestrelStats

PROMPT = "The capital of France is"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of Japan? Answer in one sentence."}]
STATS = set(KestrelStats.model_fields)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return open_checkpoint(smollm2, smollm2.parent).tokenizer()


def complete(server: Any, prompt: Any = PROMPT, max_tokens: int = 12, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name in ("top_k", "min_p", "ignore_eos")}
    return server.openai.completions.create(
        model="smollm2", prompt=prompt, max_tokens=max_tokens, extra_body=extra, **fields
    )


def chat(server: Any, messages: list[Any] = QUESTION, max_tokens: int = 24, **fields: Any) -> Any:
    return server.openai.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=max_tokens, **fields
    )


def test_completion(server: Any) -> None:
    answer = complete(server)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "smollm2")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        12,
        17,
    )
    assert set(answer.kestrel) == STATS
    assert answer.kestrel["wall_ms"] >= answer.kestrel["ttft_ms"] > answer.kestrel["prefill_ms"] > 0


def test_the_timings_add_up_to_the_first_token(server: Any) -> None:
    stats = complete(server, "Of all the cities in the world this one").kestrel
    timings = stats["timings"]
    assert sum(timings.values()) == pytest.approx(stats["ttft_ms"], abs=0.01)
    assert all(value >= 0 for value in timings.values())
    computing = timings["matmul_ms"] + timings["attention_ms"] + timings["head_ms"]
    assert 0 < computing <= stats["prefill_ms"] + 0.01


def test_chat_ends_by_itself(server: Any) -> None:
    answer = chat(server)
    assert answer.choices[0].message.role == "assistant"
    assert "Tokyo" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert set(answer.kestrel) == STATS


def test_chat_is_a_completion_of_the_rendered_template(server: Any, smollm2: Path) -> None:
    template = open_checkpoint(smollm2, smollm2.parent).chat_template()
    assert template is not None
    whole = complete(server, template.render(QUESTION), 24).choices[0].text
    assert chat(server).choices[0].message.content == whole


def test_greedy_is_the_default(server: Any) -> None:
    assert complete(server).choices[0].text == complete(server, temperature=0).choices[0].text


def test_streamed_text_is_the_whole_text(server: Any) -> None:
    chunks = list(complete(server, max_tokens=20, stream=True))
    assert len(chunks) > 10
    assert (
        "".join(chunk.choices[0].text for chunk in chunks) == complete(server, max_tokens=20).choices[0].text
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == 20


def test_streamed_chat_is_the_whole_chat(server: Any) -> None:
    chunks = list(chat(server, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(server).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert set(chunks[-1].kestrel) == STATS


@pytest.mark.parametrize("ask", [complete, chat])
def test_streams_end_with_usage_when_asked(server: Any, ask: Any) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert (
        chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )
    assert set(chunks[-1].kestrel) == STATS
    assert chunks[-2].choices[0].finish_reason is not None


def test_streams_are_server_sent_events_that_end_with_done(server: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    response = server.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_stream_pieces_are_whole_characters(server: Any) -> None:
    prompt = "Repeat: 🦅 日本 é 🦅 日本 é 🦅 日本 é\nRepeat: 🦅 日本 é 🦅 日本 é"
    chunks = list(complete(server, prompt, 24, stream=True))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert any(not piece.isascii() for piece in pieces)
    assert "\ufffd" not in "".join(pieces[:-2])


def test_completion_logprobs(server: Any, tokenizer: Tokenizer) -> None:
    choice = complete(server, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == 12
    assert "".join(logprobs.tokens) == choice.text
    for token, logprob, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        assert len(top) == 3 and top[token] == logprob == max(top.values()) <= 0  # greedy takes the likeliest
        assert choice.text[offset:].startswith(token)


def test_chat_logprobs_streamed_and_whole_are_the_same(server: Any) -> None:
    whole = chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = list(chat(server, logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole
    assert all(bytes(entry.bytes).decode() == entry.token for entry in whole)
    assert all(len(entry.top_logprobs) == 2 for entry in whole)
    assert all(entry.top_logprobs == [] for entry in chat(server, logprobs=True).choices[0].logprobs.content)


def test_stop_strings_end_the_answer_and_are_not_part_of_it(server: Any) -> None:
    text = complete(server, max_tokens=20).choices[0].text
    at = text.index("\n")
    for stop in ("\n", ["zebra", text[at - 2 : at + 1], "\n"]):
        choice = complete(server, max_tokens=20, stop=stop).choices[0]
        assert choice.finish_reason == "stop"
        assert text.startswith(choice.text) and not any(word in choice.text for word in stop)
        streamed = complete(server, max_tokens=20, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_a_seed_makes_sampling_reproducible(server: Any) -> None:
    def text(seed: int, **fields: Any) -> str:
        answer = complete(server, max_tokens=8, temperature=1.5, top_p=0.95, seed=seed, **fields)
        drawn: str = answer.choices[0].text
        return drawn

    drawn = [text(seed) for seed in (1, 2, -3)]
    assert [text(seed) for seed in (1, 2, -3)] == drawn
    assert len(set(drawn)) > 1
    assert text(1, top_k=1) == complete(server, max_tokens=8).choices[0].text


def test_token_ids_are_a_prompt(server: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = complete(server).choices[0].text
    assert complete(server, ids).choices[0].text == expected
    assert complete(server, [ids]).choices[0].text == expected
    assert complete(server, [PROMPT]).choices[0].text == expected


def test_echo_puts_the_prompt_before_the_answer(server: Any, tokenizer: Tokenizer) -> None:
    expected = PROMPT + complete(server, max_tokens=4).choices[0].text
    assert complete(server, max_tokens=4, echo=True).choices[0].text == expected
    assert complete(server, tokenizer.encode(PROMPT), 4, echo=True).choices[0].text == expected
    streamed = complete(server, max_tokens=4, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def entries(logprobs: Any) -> list[Any]:
    """Token, log probability, alternatives and place of each token of a completion."""
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    return list(zip(*lists, strict=True))


def test_echo_with_logprobs_scores_the_prompt(server: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    complete(server)  # what is in memory is not used
    answer = complete(server, max_tokens=4, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == complete(server, max_tokens=4, echo=True).choices[0].text
    tokens, logprobs, top, offsets = zip(*entries(choice.logprobs), strict=True)
    assert "".join(tokens) == choice.text and len(tokens) == len(ids) + 4
    assert all(choice.text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
    assert logprobs[0] is None and top[0] is None
    assert all(len(each) == 2 for each in top[1:])
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.kestrel["matched_tokens"] == 0
    assert answer.kestrel["computed_tokens"] == len(ids)
    assert "every prompt token" in answer.kestrel["miss_reason"]
    # Each is what the model says of that token when it is to be the next one.
    for n in range(1, len(ids)):
        alone = complete(server, ids[:n], 1, logprobs=20).choices[0].logprobs.top_logprobs[0]
        assert logprobs[n] == alone.get(tokens[n], logprobs[n]) <= max(alone.values()) == max(top[n].values())
    plain = complete(server, max_tokens=4, logprobs=2).choices[0].logprobs
    assert (plain.token_logprobs, plain.top_logprobs) == (list(logprobs[len(ids) :]), list(top[len(ids) :]))


def test_a_prompt_is_scored_without_generating(server: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    whole = complete(server, max_tokens=4, echo=True, logprobs=2).choices[0]
    for prompt in (PROMPT, ids, [ids]):
        answer = complete(server, prompt, 0, echo=True, logprobs=2)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        assert entries(choice.logprobs) == entries(whole.logprobs)[: len(ids)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    one = complete(server, ids[:1], 0, echo=True, logprobs=0).choices[0]
    assert one.logprobs.token_logprobs == [None]
    nothing = complete(server, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].logprobs) == ("", None)


def test_a_scored_prompt_can_be_streamed(server: Any) -> None:
    for max_tokens in (0, 4):
        whole = complete(server, max_tokens=max_tokens, echo=True, logprobs=2).choices[0]
        chunks = list(complete(server, max_tokens=max_tokens, echo=True, logprobs=2, stream=True))
        pieces = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [entry for piece in pieces if piece.logprobs for entry in entries(piece.logprobs)] == entries(
            whole.logprobs
        )
        assert pieces[-1].finish_reason == "length" and chunks[-1].usage.completion_tokens == max_tokens


def test_control_tokens_of_a_scored_prompt_have_places(server: Any, smollm2: Path) -> None:
    template = open_checkpoint(smollm2, smollm2.parent).chat_template()
    assert template is not None
    text = template.render(QUESTION)
    scored = complete(server, text, 0, echo=True, logprobs=0).choices[0]
    assert "".join(scored.logprobs.tokens) == scored.text == text
    places = zip(scored.logprobs.text_offset, scored.logprobs.tokens, strict=True)
    assert all(text[at:].startswith(token) for at, token in places)


def test_an_identical_prompt_computes_one_token(server: Any) -> None:
    prompt = (
        "Once upon a time there was a kestrel that hovered over a field and looked for mice in the grass."
    )
    first = complete(server, prompt)
    again = complete(server, prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0 and first.kestrel["miss_reason"]
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.kestrel["computed_tokens"] == 1 and again.kestrel["miss_reason"] is None
    assert again.choices[0].text == first.choices[0].text


def test_no_max_tokens_means_the_configured_number(server: Any) -> None:
    answer = server.openai.completions.create(
        model="smollm2", prompt="1, 2, 3, 4,", extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 20


def test_models(server: Any) -> None:
    [model] = server.openai.models.list().data
    assert model.id == "smollm2"
    assert server.openai.models.retrieve("smollm2") == model


def test_health(server: Any) -> None:
    complete(server)
    health = server.http.get("/health").json()
    assert (health["status"], health["model"]) == ("ok", "smollm2")
    assert health["namespace"] == complete(server).system_fingerprint
    assert health["queue"] == {"running": 0, "places": 16, "waiting": 0, "capacity": 32}
    assert health["store"]["root"] == "artifacts/kv"
    assert health["uptime_seconds"] > 0


def test_metrics(server: Any) -> None:
    def read() -> dict[str, float]:
        response: httpx.Response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = read()
    answer = complete(server)
    after = read()
    gained = {name: after[name] - before[name] for name in after}
    assert gained['kestrel_requests_total{outcome="length"}'] == 1
    assert gained["kestrel_answer_tokens_total"] == 12
    sources = [
        gained[f'kestrel_prompt_tokens_total{{source="{source}"}}'] for source in ("disk", "ram", "computed")
    ]
    assert sources == [answer.kestrel[name] for name in ("restored_tokens", "ram_tokens", "computed_tokens")]
    assert gained['kestrel_seconds_total{part="wall"}'] > 0 and after["kestrel_requests_running"] == 0


def test_monitors_may_ask_for_heads_alone(server: Any) -> None:
    for path in ("/", "/health", "/ready"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_pages_for_people(server: Any) -> None:
    for path in ("/", "/docs"):
        page: httpx.Response = server.http.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")


def test_the_api_description_names_requests_answers_and_errors(server: Any) -> None:
    api = server.http.get("/openapi.json").json()
    for path, request, answer in (
        ("/v1/completions", "CompletionRequest", "Completion"),
        ("/v1/chat/completions", "ChatRequest", "ChatCompletion"),
    ):
        post = api["paths"][path]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{request}")
        schemas = {
            status: reply["content"]["application/json"]["schema"]
            for status, reply in post["responses"].items()
        }
        assert schemas["200"]["$ref"].endswith(f"/{answer}")
        assert all(
            schemas[status]["$ref"].endswith("/ErrorAnswer") for status in ("400", "404", "413", "429", "503")
        )


def test_several_choices_are_the_answers_of_single_requests(server: Any) -> None:
    fields = {"temperature": 1.2, "max_tokens": 8}
    expected = [complete(server, seed=seed, **fields).choices[0].text for seed in (5, 6, 7)]
    answer = complete(server, seed=5, n=3, **fields)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    chunks = list(complete(server, seed=5, n=3, stream=True, **fields))
    texts = ["", "", ""]
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == expected and reasons == {0: "length", 1: "length", 2: "length"}
    assert chunks[-1].usage.completion_tokens == 24
    spoken = chat(server, n=2, seed=1, temperature=1.0, max_tokens=5)
    assert len(spoken.choices) == 2


def test_penalties_change_the_answer(server: Any) -> None:
    repeating = "1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2,"
    for prompt, penalty in ((repeating, "frequency_penalty"), (PROMPT, "presence_penalty")):
        plain = complete(server, prompt, 32).choices[0].text
        assert complete(server, prompt, 32, **{penalty: 2.0}).choices[0].text != plain
        assert complete(server, prompt, 32, **{penalty: 0.0}).choices[0].text == plain


def test_max_completion_tokens(server: Any) -> None:
    answer = server.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, max_completion_tokens=3
    )
    assert answer.usage.completion_tokens == 3


def test_tokenize(server: Any, tokenizer: Tokenizer, smollm2: Path) -> None:
    def tokenize(**body: Any) -> Any:
        return server.http.post("/v1/tokenize", json=body).json()

    answer = tokenize(prompt=PROMPT)
    assert answer == {
        "tokens": tokenizer.encode(PROMPT),
        "count": 5,
        "context_tokens": answer["context_tokens"],
    }
    template = open_checkpoint(smollm2, smollm2.parent).chat_template()
    assert template is not None
    assert tokenize(messages=QUESTION)["tokens"] == tokenizer.encode(template.render(QUESTION))
    assert "error" in tokenize() and "error" in tokenize(prompt="a", messages=QUESTION)


def test_template_variables(start_server: Any, qwen_words: tuple[str, ...], tmp_path: Path) -> None:
    template = tmp_path / "think.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking is false %} no thinking{% endif %}")
    server = start_server(*qwen_words, f"model.chat_template={template}", "cache=off")
    for variables, text in (({}, "Hi"), ({"enable_thinking": False}, "Hi no thinking")):
        body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": variables}
        tokens = server.http.post("/v1/tokenize", json=body).json()["tokens"]
        assert tokens == server.http.post("/v1/tokenize", json={"prompt": text}).json()["tokens"]
        answer = server.openai.chat.completions.create(
            model="tiny",
            messages=body["messages"],
            max_tokens=1,
            extra_body={"chat_template_kwargs": variables},
        )
        assert answer.usage.prompt_tokens == len(tokens)


def test_requests_have_names(server: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    named = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "order-66"})
    assert named.headers["x-request-id"] == "order-66"
    assert "id=order-66" in server.log
    for wrong in ("a b", "x" * 129, "new\u00e9"):
        given = server.http.get("/v1/models", headers={"X-Request-Id": wrong.encode("latin-1")})
        assert given.headers["x-request-id"].startswith("req-")
    assert server.http.get("/v9").headers["x-request-id"].startswith("req-")
