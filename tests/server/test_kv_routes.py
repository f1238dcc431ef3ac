"""Promise: what is stored can be looked at, kept, and forgotten, and a request says what becomes of its KV."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def tokens_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 300, count).tolist()


@pytest.fixture
def kv_server(start_server: Any, tiny_words: tuple[str, ...]) -> Any:
    return start_server(*tiny_words, "cache.page_tokens=128", "server.max_prompt_tokens=450")


def complete(server: Any, prompt: list[int], **options: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "kestrel": options}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def find(server: Any, **body: Any) -> Any:
    return server.http.post("/v1/kv/find", json=body).json()


def wait_saved(server: Any, num_tokens: int) -> None:
    server.wait_for(f"[KV-DISK] saved {num_tokens}-token KV")


def test_find_explains_without_running(kv_server: Any) -> None:
    prompt = tokens_of(300, 1)
    missed = find(kv_server, prompt=prompt)
    assert (missed["stored_tokens"], missed["ram_tokens"], missed["computed_tokens"]) == (0, 0, 300)
    assert missed["miss_reason"] and missed["pages"] == []
    complete(kv_server, prompt)
    wait_saved(kv_server, 301)
    found = find(kv_server, prompt=[*prompt[:280], *tokens_of(20, 2)])
    assert (found["stored_tokens"], found["ram_tokens"], found["computed_tokens"]) == (280, 280, 20)
    assert [(page["first"], page["num_tokens"], page["num_used"]) for page in found["pages"]] == [
        (0, 128, 128),
        (128, 128, 128),
        (256, 45, 24),
    ]
    assert found["diverged_at"] == 280
    assert find(kv_server, messages=[{"role": "user", "content": "Hi"}])["prompt_tokens"] > 1
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": [1] * 460}):
        assert "error" in find(kv_server, **body)


def test_pages_are_listed_pinned_and_deleted(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    first = start_server(*tiny_words, "cache.page_tokens=128")
    for seed in range(3):
        complete(first, tokens_of(200, seed))
    first.send(signal.SIGTERM)
    assert first.exit_code() == 0
    server = start_server(*tiny_words, "cache.page_tokens=128")
    pages: list[Any] = []
    after: int | None = 0
    while after is not None:
        part = server.http.get("/v1/kv", params={"limit": 4, "after": after}).json()
        assert part["total"] == 6 and 0 < len(part["data"]) <= 4
        pages += part["data"]
        after = part["next"]
    assert len({page["key"] for page in pages}) == 6
    leaf = next(page for page in pages if page["num_children"] == 0)
    inner = next(page for page in pages if page["num_children"] == 1)
    assert server.http.post("/v1/kv/pin", json={"key": leaf["key"]}).json()["changed"] == 1
    assert server.http.delete(f"/v1/kv/{leaf['key']}").json() == {"changed": 0, "kept": 1}
    assert server.http.post("/v1/kv/unpin", json={"key": leaf["key"]}).json()["changed"] == 1
    assert server.http.delete(f"/v1/kv/{inner['key']}").json() == {"changed": 0, "kept": 1}
    assert server.http.delete(f"/v1/kv/{leaf['key']}").json() == {"changed": 1, "kept": 0}
    assert server.http.get("/v1/kv").json()["total"] == 5
    for key in (leaf["key"], "0" * 32):
        assert server.http.delete(f"/v1/kv/{key}").status_code == 404
    for key in ("..%2F..%2Fetc%2Fpasswd", "0" * 31, "0" * 31 + "G"):
        assert server.http.delete(f"/v1/kv/{key}").status_code in (400, 404)
    for limit in (0, 1001, "x"):
        assert server.http.get("/v1/kv", params={"limit": limit}).status_code == 400


def test_what_is_not_to_persist_is_never_on_disk(kv_server: Any) -> None:
    prompt = tokens_of(300, 7)
    complete(kv_server, prompt, persist=False)
    again = complete(kv_server, prompt, persist=False)
    assert again["kestrel"]["ram_tokens"] == 299  # memory is another matter
    kv_server.send(signal.SIGTERM)
    assert kv_server.exit_code() == 0
    assert not list(Path(kv_server.folder, "artifacts/kv").rglob("*.safetensors"))


def test_a_request_can_pin_what_it_computes(kv_server: Any) -> None:
    answer = complete(kv_server, tokens_of(200, 8), pin=True)
    wait_saved(kv_server, 201)
    [page] = [page for page in kv_server.http.get("/v1/kv").json()["data"] if page["pinned"]]
    assert page["key"] == answer["kestrel"]["key"]


def test_what_a_request_saves_can_expire(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    sweeping = (
        "import sys, kestrel.server.app as app, kestrel.server.start as start, kestrel.config as config; "
    )
    program = ("-c", sweeping + "app.SWEEP_SECONDS = 0.2; start.serve(config.load_config(sys.argv[1:]))")
    server = start_server(*tiny_words, "cache.page_tokens=128", program=program)
    stays = complete(server, tokens_of(200, 20))
    complete(server, tokens_of(250, 21), ttl_s=0.5)
    server.wait_for("kestrel: sweep files=2")
    assert server.http.get("/v1/kv").json()["total"] == 2
    assert find(server, prompt=tokens_of(250, 21))["stored_tokens"] == 0
    assert stays["kestrel"]["key"] in {page["key"] for page in server.http.get("/v1/kv").json()["data"]}


def test_purging_a_session_forgets_it_and_nothing_else(kv_server: Any) -> None:
    common = tokens_of(128, 9)
    mine, other = common + tokens_of(150, 10), common + tokens_of(150, 11)
    complete(kv_server, other)
    first = complete(kv_server, mine)
    longer = complete(kv_server, mine + tokens_of(90, 12))
    wait_saved(kv_server, 369)
    purged = kv_server.http.post("/v1/kv/purge", json={"key": first["kestrel"]["key"]}).json()
    assert purged == {
        "changed": 1,
        "kept": 0,
    }  # the page with its answer; what the longer one continues stays
    assert find(kv_server, prompt=mine)["computed_tokens"] == 1
    purged = kv_server.http.post("/v1/kv/purge", json={"key": longer["kestrel"]["key"]}).json()
    assert purged["changed"] >= 2 and purged["kept"] == 0
    found = find(kv_server, prompt=mine)
    assert (found["stored_tokens"], found["ram_tokens"]) == (128, 128)  # what the other one needs, too
    assert find(kv_server, prompt=other)["computed_tokens"] == 1
    assert complete(kv_server, mine)["kestrel"]["computed_tokens"] == 150


def test_prompts_longer_than_the_server_takes(kv_server: Any) -> None:
    refused = kv_server.http.post("/v1/completions", json={"prompt": [5] * 451})
    assert refused.status_code == 413 and "server.max_prompt_tokens" in refused.json()["error"]["message"]


def test_without_a_store(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    server = start_server(*tiny_words, "cache=off")
    assert server.http.get("/v1/kv").status_code == 400
    assert find(server, prompt=[5, 6])["computed_tokens"] == 2
    answer = complete(server, tokens_of(200, 1))
    purge = server.http.post("/v1/kv/purge", json={"key": answer["kestrel"]["key"]}).json()
    assert purge == {"changed": 0, "kept": 0}
    assert find(server, prompt=tokens_of(200, 1))["ram_tokens"] == 0
