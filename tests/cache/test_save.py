"""Saving costs a turn its new pages only, and never fails or delays a request."""

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kestrel.cache import save
from kestrel.engine import priority
from kestrel.errors import StoreError
from kestrel.log import log_to_stderr
from kestrel.runtime import Delta, Finished, Request
from kestrel.store.eviction import Limits
from kestrel.store.store import Store
from tests.cache.conftest import Boot, logits_bits, tokens_of

PROMPT = tokens_of(420)


def test_the_second_turn_writes_its_new_pages_only(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, PROMPT)
    runtime = boot()
    longer = PROMPT + tokens_of(80, seed=4)
    sequence = runtime.cache.open(longer)
    sequence.prefill()
    sequence.close()
    runtime.writer.drain()
    per_token = runtime.engine.geometry.kv_bytes_per_token
    new = len(longer) - sequence.stats.matched_tokens
    # the partial page is written again with its new rows; nothing before it is
    assert sequence.saves.bytes_written < 2 * per_token * (new + 128)
    assert sequence.saves.pages_written == 1


def test_a_partial_page_goes_when_a_longer_one_covers_it(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, PROMPT, further=0)
    assert sorted(row.num_tokens for row in runtime.store.list_pages()) == [36, 128, 128, 128]
    logits_bits(runtime, PROMPT + tokens_of(20, seed=4), further=0)
    assert sorted(row.num_tokens for row in runtime.store.list_pages()) == [56, 128, 128, 128]


def test_a_prompt_inside_a_stored_prefix_writes_nothing(boot: Boot) -> None:
    logits_bits(boot(), PROMPT, further=0)
    runtime = boot()
    logits_bits(runtime, PROMPT[:400], further=0)
    assert sorted(row.num_tokens for row in runtime.store.list_pages()) == [36, 128, 128, 128]
    assert not any("saved" in line for line in runtime.lines)


def test_a_request_prints_one_saved_line_with_its_tokens_and_path(boot: Boot) -> None:
    runtime = boot()
    for event in runtime.generate(Request(PROMPT, 5, ignore_eos=True)):
        assert isinstance(event, Delta | Finished)
    runtime.writer.drain()
    saved = [line for line in runtime.lines if "saved" in line]
    assert len(saved) == 1 and saved[0].startswith("[KV-DISK] saved 424-token KV -> ")
    assert Path(saved[0].split("-> ")[1]).is_file()


def test_a_full_queue_drops_pages_and_the_answer_is_the_same(boot: Boot) -> None:
    bits, _ = logits_bits(boot("cache=off"), PROMPT)
    runtime = boot("cache.save_queue_pages=1")
    publish = runtime.store.publish
    import time

    def slow(*args: object) -> int:
        time.sleep(0.2)
        return publish(*args)

    runtime.store.publish = slow
    assert logits_bits(runtime, PROMPT)[0] == bits
    assert runtime.writer.num_dropped > 0
    assert len(runtime.store.list_pages()) < 4


def test_a_store_that_cannot_be_written_is_reported_once_and_used_again_when_it_can(boot: Boot) -> None:
    runtime = boot()
    publish = runtime.store.publish

    def failing(*args: object) -> int:
        raise StoreError("no space left on device")

    runtime.store.publish = failing
    logits_bits(runtime, PROMPT)
    logits_bits(runtime, tokens_of(300, seed=8))
    assert len([line for line in runtime.lines if "no space left" in line]) == 1
    runtime.store.publish = publish
    logits_bits(runtime, tokens_of(300, seed=9))
    assert any("saved 303-token" in line for line in runtime.lines)


def test_a_page_that_is_there_already_does_not_count_as_recovery(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, tokens_of(130, seed=8))
    runtime.engine.pool.forget(list(runtime.engine.pool._cached))
    publish = runtime.store.publish

    def full(*args: object) -> int:
        if args[5] == 0 and runtime.store.find_row(args[3]) is not None:  # first, key
            return 0
        raise StoreError("no space left on device")

    runtime.store.publish = full
    for seed in (9, 8, 10, 8, 11):
        sequence = runtime.cache.open(tokens_of(130, seed=seed))
        sequence._stored = (
            set()
        )  # as if it had been evicted when the prompt was matched, and saved by another since
        sequence.prefill()
        sequence.close()
        runtime.writer.drain()
    assert len([line for line in runtime.lines if "no space left" in line]) == 1
    runtime.store.publish = publish
    logits_bits(runtime, tokens_of(130, seed=12))
    recovered = [line for line in runtime.lines if "the store works again: saving" in line]
    assert recovered == [
        f"[KV-DISK] the store works again: saving; {runtime.writer.num_dropped} page(s) were not saved meanwhile"
    ]


def test_a_log_that_takes_no_more_lines_keeps_nobody_from_working(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = boot(log=log_to_stderr)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        *_, finished = runtime.generate(Request(PROMPT, 5))
        runtime.writer.drain()
        with suppress(OSError):  # what is left in its buffer
            full.close()
    assert isinstance(finished, Finished)
    assert runtime.store.usage().files == 4


def test_a_spent_write_budget_is_said_once_and_answers_stay_right(boot: Boot) -> None:
    bits, _ = logits_bits(boot("cache=off"), PROMPT)
    runtime = boot("cache.write_bytes_per_hour=100KB")
    assert logits_bits(runtime, PROMPT)[0] == bits
    logits_bits(runtime, tokens_of(300, seed=8))
    assert len([line for line in runtime.lines if "write_bytes_per_hour=100,000" in line]) == 1
    assert runtime.writer.num_dropped >= runtime.store.stats()["refused_pages"] > 0
    assert runtime.writer.bytes_written <= 100_000


def test_nothing_behind_a_page_that_was_not_saved_is_saved_until_it_is(boot: Boot) -> None:
    runtime = boot()
    publish = runtime.store.publish

    def failing(*args: object) -> int:
        if args[5] == 128:  # first
            raise StoreError("no space left on device")
        return publish(*args)

    runtime.store.publish = failing
    logits_bits(runtime, PROMPT, further=0)
    assert [row.first for row in runtime.store.list_pages()] == [0]
    assert not any("saved 420" in line for line in runtime.lines)
    runtime.store.publish = publish
    logits_bits(runtime, PROMPT + tokens_of(20, seed=4), further=0)  # the next turn, from memory
    assert sorted(row.num_tokens for row in runtime.store.list_pages()) == [56, 128, 128, 128]
    assert runtime.store.verify().orphans == 0


def test_waiting_for_the_writer_ends_although_more_is_queued_meanwhile(boot: Boot) -> None:
    runtime = boot()
    publish, may_write, is_over = runtime.store.publish, threading.Event(), threading.Event()

    def slow(*args: object) -> int:
        assert (may_write if args[5] == 0 else is_over).wait(10)  # first
        return publish(*args)

    runtime.store.publish = slow
    runtime.cache.open(tokens_of(128)).prefill()
    waiting = threading.Thread(target=lambda: (runtime.writer.drain(), is_over.set()))
    waiting.start()
    while runtime.writer.num_pending < 2:
        time.sleep(0.01)
    runtime.cache.open(tokens_of(256)).prefill()  # its second page is queued behind
    may_write.set()
    waiting.join(5)
    assert is_over.is_set()


def test_the_writer_rests_while_answers_are_computed_unless_somebody_waits(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "RESTS", 1e9)
    monkeypatch.setattr(priority, "_STEPS_APART_SECONDS", 1e9)
    runtime = boot()
    written, publish = threading.Semaphore(0), runtime.store.publish

    def watched(*args: object) -> int:
        nbytes = publish(*args)
        written.release()
        return nbytes

    runtime.store.publish = watched
    runtime.cache.open(tokens_of(256)).prefill()  # two pages
    assert written.acquire(timeout=30)
    assert not written.acquire(timeout=0.3)
    runtime.writer.drain()
    assert written.acquire(timeout=30)
    runtime.cache.open(tokens_of(256, seed=5)).prefill()
    assert written.acquire(timeout=30)
    monkeypatch.setattr(priority, "_STEPS_APART_SECONDS", 0.1)  # nothing is computed any more
    assert written.acquire(timeout=30)


def test_the_writer_does_not_rest_where_its_pages_may_be_needed(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "RESTS", 1e9)
    monkeypatch.setattr(priority, "_STEPS_APART_SECONDS", 1e9)
    page_nbytes = boot().engine.pool.page_nbytes
    runtime = boot(f"engine.kv_ram_bytes={5 * page_nbytes}")
    runtime.cache.open(tokens_of(384)).prefill()  # three of five pages
    deadline = time.monotonic() + 60
    while runtime.writer.num_pending:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert runtime.store.usage().files == 3


def test_a_queue_that_fills_up_ends_the_rest_of_the_writer(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "RESTS", 1e9)
    monkeypatch.setattr(priority, "_STEPS_APART_SECONDS", 1e9)
    runtime = boot("cache.save_queue_pages=2")
    deadline = time.monotonic() + 60
    for seed in range(6):
        while runtime.writer.num_pending > 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        runtime.cache.open(tokens_of(128, seed)).prefill()
    assert runtime.writer.num_dropped == 0


def test_a_time_to_live_holds_from_the_moment_a_page_is_written(boot: Boot) -> None:
    runtime = boot()
    runtime.cache.open(PROMPT, ttl_seconds=0.1).prefill()  # a kill could come here, before the answer ends
    runtime.writer.drain()
    assert runtime.store.usage().files == 3
    time.sleep(0.2)
    assert runtime.store.sweep() == []  # while the request goes on nothing of it leaves
    with Store(runtime.store.root, Limits()) as another:
        assert len(another.sweep()) == 3


def test_positions_beyond_the_limit_are_not_saved(boot: Boot) -> None:
    runtime = boot("cache.max_prefix_tokens=256")
    logits_bits(runtime, PROMPT)
    assert sorted(row.first for row in runtime.store.list_pages()) == [0, 128]


def test_a_cancelled_prefill_keeps_what_it_computed(boot: Boot) -> None:
    runtime = boot("engine.chunk_tokens=64")
    steps = []

    def cancelled() -> bool:
        steps.append(1)
        return len(steps) > 4

    events = list(runtime.generate(Request(PROMPT, 5), cancelled))
    assert isinstance(events[-1], Finished) and events[-1].finish_reason == "cancelled"
    runtime.writer.drain()
    _, stats = logits_bits(boot(), PROMPT)
    assert stats.restored_tokens == 256


def test_closing_a_restore_before_its_first_step_keeps_the_store_as_it_is(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, PROMPT, further=0)
    before = {row.key for row in runtime.store.list_pages()}
    runtime = boot()
    assert [e.finish_reason for e in runtime.generate(Request(PROMPT, 5), lambda: True)] == ["cancelled"]
    runtime.writer.drain()
    assert {row.key for row in runtime.store.list_pages()} == before
    assert logits_bits(runtime, PROMPT)[1].ram_tokens == 419


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_a_store_within_its_limits_evicts_leaves_and_answers_stay_right(boot: Boot, kv: str) -> None:
    runtime = boot("cache.max_files=3", f"engine.kv={kv}")
    bits = [logits_bits(runtime, tokens_of(300, seed))[0] for seed in range(3)]
    assert len(runtime.store.list_pages()) <= 3
    runtime = boot("cache.max_files=3", f"engine.kv={kv}")
    assert [logits_bits(runtime, tokens_of(300, seed))[0] for seed in range(3)] == bits
