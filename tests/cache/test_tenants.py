"""Promise: behind a prefix that all share everybody has pages of their own, which can be checked, shown and forgotten;
what one session's purge forgets does not come back, and nobody else loses anything."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrel.cache.purge import Purged, purge_session
from kestrel.cache.scope import Scope
from kestrel.generation import Finished
from kestrel.identity import as_tokens
from kestrel.runtime import Generation, Request, Runtime
from tests.cache.conftest import Boot, tokens_of

ROOT = Path(__file__).parent.parent.parent


def run(runtime: Runtime, tokens: list[int], scope: Scope | None = None, count: int = 3) -> Finished:
    """Answer a request to its end."""
    request = Request(tokens, count, ignore_eos=True, scope=scope)
    *_, finished = runtime.generate(request)
    assert isinstance(finished, Finished)
    drain(runtime)
    return finished


def drain(runtime: Runtime) -> None:
    if runtime.writer is not None:
        runtime.writer.drain()


def finish(runtime: Runtime, generation: Generation) -> list[int]:
    """Take a generation to its end; the tokens of its answer."""
    events: list[Any] = []
    while not generation.finished:
        runtime.step([generation])
        events += generation.take()
    drain(runtime)
    return [token for event in events if not isinstance(event, Finished) for token in event.tokens]


def purge(runtime: Runtime, key: str | None, scope: Scope | None = None) -> Purged:
    assert key is not None
    return purge_session(runtime.cache, scope or runtime.cache.common, bytes.fromhex(key))


def known(runtime: Runtime, tokens: list[int], scope: Scope | None = None) -> tuple[int, int]:
    """How much of a prompt is stored and in memory, its last token included."""
    followed = [*tokens, 5]
    array = as_tokens(followed)
    in_ram = runtime.cache.find_in_ram(array, runtime.cache.course(array, scope))
    return runtime.find(followed, scope).num_tokens, sum(rows for _, rows in in_ram)


def kestrel(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kestrel", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("length", [256, 300])
def test_a_tenants_pages_behind_a_shared_prefix_are_no_orphans(
    boot: Boot, tmp_path: Path, length: int
) -> None:
    shared, tail = tokens_of(length), tokens_of(200, 1)
    runtime = boot()
    assert runtime.store is not None
    runtime.share([shared])
    keys = [run(runtime, shared + tail, runtime.tenant_scope(name)).stats.key for name in ("alice", "bob")]
    run(runtime, tokens_of(256, 2))  # pages that end at the same place and have nothing to do with it
    report = runtime.store.verify()
    assert (report.damaged, report.orphans) == ((), 0) and report.files >= 7
    for key in keys:
        assert key is not None
        chain = runtime.store.chain(bytes.fromhex(key))
        assert len({page.namespace for page in chain}) == 2
        assert [int(token) for token in runtime.store.prefix_tokens(bytes.fromhex(key))][:-2] == shared + tail
    root = f"cache.root={tmp_path / 'kv'}"
    shown = json.loads(kestrel("kv", "show", str(keys[0]), "--json", root).stdout)
    assert shown["tokens"][:-2] == shared + tail and shown["pages"][-1]["key"] == keys[0]
    assert "0 damaged, 0 orphans" in kestrel("kv", "verify", root).stdout

    # Without the page they stand behind they are out of reach, and are said to be.
    chain = runtime.store.chain(bytes.fromhex(str(keys[0])))
    trunk = chain[1]
    runtime.store.page_path(trunk.namespace, trunk.key).unlink()
    report = runtime.store.verify()
    own = [page for page in runtime.store.list_pages() if page.namespace not in (trunk.namespace,)]
    assert report.orphans == len(own) + (length > 256)


def test_a_shared_prefix_is_common_to_the_token_once_a_tenant_has_computed_it(boot: Boot) -> None:
    for length in (40, 300):  # shorter than a page, and with a rest behind two of them
        shared = tokens_of(length, length)
        answers = []
        for _ in range(2):  # in memory, then in a new process
            runtime = boot()
            runtime.share([shared])
            for name in ("alice", "bob", "carol"):
                finished = run(runtime, shared + tokens_of(30, 7), runtime.tenant_scope(name))
                answers.append((name, finished.stats.computed_tokens))
                other = tokens_of(length + 30, 8)
                assert known(runtime, other, runtime.tenant_scope(name)) == (0, 0)
        assert answers[:3] == [("alice", length + 30), ("bob", 30), ("carol", 30)]
        assert [count for _, count in answers[3:]] == [1, 1, 1]
        assert runtime.store is not None
        report = runtime.store.verify()
        assert (report.damaged, report.orphans) == ((), 0)


def test_what_is_not_to_persist_shares_nothing_on_disk(boot: Boot) -> None:
    runtime = boot()
    runtime.share([tokens_of(40)])
    scope = runtime.tenant_scope("alice")
    list(runtime.generate(Request(tokens_of(40) + [7] * 9, 2, scope=scope, persist=False)))
    drain(runtime)
    assert runtime.store is not None and runtime.store.usage().files == 0


@pytest.mark.parametrize("tenant", [None, "alice"])
@pytest.mark.parametrize("num_first", [40, 127, 150])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_what_a_running_request_computes_does_not_bring_a_purged_session_back(
    boot: Boot, num_first: int, num_steps: int, tenant: str | None
) -> None:
    runtime = boot("engine.chunk_tokens=64")
    assert runtime.store is not None
    scope = None if tenant is None else runtime.tenant_scope(tenant)
    common = tokens_of(128, 3)
    other = common + tokens_of(100, 4)
    first = common + tokens_of(num_first, 5)
    run(runtime, other, scope)
    before = {page.key for page in runtime.store.list_pages()}
    turn = run(runtime, first, scope)
    answered = runtime.store.prefix_tokens(bytes.fromhex(str(turn.stats.key))).tolist()
    longer = answered + tokens_of(60, 7)
    request = Request(longer, 100, ignore_eos=True, scope=scope)
    expected = finish(runtime, running := runtime.start(request))
    runtime.engine.pool.forget([page.key for page in runtime.engine.pool.remembered()])
    purge(runtime, running.stats().key, scope)
    assert known(runtime, longer, scope) == (128, 0)

    turn = run(runtime, first, scope)
    generation = runtime.start(request)
    beside = runtime.start(Request(other + tokens_of(60, 8), 3, scope=scope))
    for _ in range(num_steps):
        runtime.step([generation])
        generation.take()
    purge(runtime, turn.stats.key, scope)
    assert known(runtime, longer, scope)[0] == 128
    told = finish(runtime, generation)
    assert expected[-len(told) :] == told  # the answer is what it was
    assert generation.stats().key is None
    stored, in_ram = known(runtime, longer, scope)
    assert stored == 128 and in_ram <= 128  # what the other session needs
    finish(runtime, beside)
    assert known(runtime, other, scope) == (228, 228)
    after = {page.key for page in runtime.store.list_pages()}
    assert len(before - after) <= 1  # the other session's last page, which a longer one covers now
    report = runtime.store.verify()
    assert (report.damaged, report.orphans) == ((), 0)
    pool = runtime.engine.pool
    assert pool.num_available == pool.num_pages


def test_purging_while_many_requests_run(boot: Boot) -> None:
    """Purges from another thread, at any moment of a request, leave nothing of its session."""
    runtime = boot("engine.chunk_tokens=32")
    assert runtime.store is not None
    over = threading.Event()
    first = run(runtime, tokens_of(200, 1)).stats.key
    prompt = runtime.store.prefix_tokens(bytes.fromhex(str(first))).tolist() + tokens_of(100, 2)
    problems: list[BaseException] = []

    def purge_again_and_again() -> None:
        try:
            while not over.is_set():
                purge(runtime, first)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=purge_again_and_again)
    thread.start()
    try:
        for _ in range(12):
            generation = runtime.start(Request(prompt, 20, ignore_eos=True))
            finish(runtime, generation)
    finally:
        over.set()
        thread.join()
    assert not problems
    purge(runtime, first)
    generation = runtime.start(Request(prompt, 20, ignore_eos=True))
    purge(runtime, first)
    finish(runtime, generation)
    assert runtime.store.usage().files == 0
    assert known(runtime, prompt) == (0, 0)
