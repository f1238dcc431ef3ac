"""Promise: a hit is read when that is no slower than computing, and a slow disk never makes an answer much later."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.cache import restore
from kestrel.cache.worth import LEAST_SECONDS, TRIAL, Choice, Worth
from kestrel.runtime import Request
from kestrel.store.artifact import OpenPage
from kestrel.store.match import PageRef
from tests.cache.conftest import Boot, logits_bits, tokens_of

PAGE = 256
PAGE_NBYTES = 1_000_000


def pages_of(count: int, last_used: int = PAGE) -> list[PageRef]:
    """`count` pages that follow each other, the last used up to a token."""
    return [
        PageRef(
            b"", b"", n * PAGE, PAGE, PAGE if n < count - 1 else last_used, Path(), PAGE_NBYTES, b"", b"", ""
        )
        for n in range(count)
    ]


def learned(tokens_per_second: float, bytes_per_second: float, **options: Any) -> Worth:
    """What a process knows after a long prompt and a long read."""
    worth = Worth(2e8, 1e4, flops=50e9, chunk_tokens=512, **options)
    worth.note_step(512, 512 * 256, 512 / tokens_per_second, 0.0)
    worth.note_read(10 * PAGE_NBYTES, 10 * PAGE_NBYTES / bytes_per_second)
    return worth


def test_a_new_process_reads() -> None:
    choice = Worth(1e6, 1e2, flops=1600e9, chunk_tokens=512).choose(pages_of(8), 0, 8 * PAGE + 31)
    assert choice.num_pages == 8


def test_without_a_measured_read_the_hit_is_read_however_fast_computing_is() -> None:
    worth = Worth(1e6, 1e2, flops=50e9, chunk_tokens=512)
    worth.note_step(512, 512 * 256, 0.512, 0.0)
    choice = worth.choose(pages_of(8), 0, 8 * PAGE + 31)
    assert choice.num_pages == 8 and "no read was measured" in choice.why


def test_a_fast_disk_is_read_and_a_slow_one_is_not() -> None:
    # 2,048 tokens take 2 s to compute; their pages 8 ms or 80 s to read.
    assert learned(1000, 1e9).choose(pages_of(8), 0, 8 * PAGE + 31).num_pages == 8
    choice = learned(1000, 1e5).choose(pages_of(8), 0, 8 * PAGE + 31)
    assert choice.num_pages == 0
    assert choice.seconds == choice.computing == pytest.approx(2.079, rel=0.01)
    assert str(choice).startswith("not read, estimated")


def test_in_between_a_part_is_read_while_the_rest_is_computed() -> None:
    worth = learned(
        1000, 5e6
    )  # a page: 200 ms to read, 256 ms to compute; the step behind the read takes 512 ms
    choice = worth.choose(pages_of(32), 0, 32 * PAGE)
    everything = worth.reading_seconds(32 * PAGE_NBYTES)
    assert 0 < choice.num_pages < 32
    assert choice.seconds < min(everything, choice.computing)
    assert str(choice).startswith("read in part")


@pytest.mark.parametrize("tokens_per_second", (100, 1000, 10_000))
@pytest.mark.parametrize("bytes_per_second", (1e5, 1e6, 4e6, 1e7, 1e8, 1e10))
@pytest.mark.parametrize("count", (1, 3, 32))
def test_the_choice_is_never_estimated_slower_than_computing(
    tokens_per_second: float, bytes_per_second: float, count: int
) -> None:
    choice = learned(tokens_per_second, bytes_per_second).choose(pages_of(count), 0, count * PAGE + 31)
    assert choice.seconds <= max(choice.computing, LEAST_SECONDS)


def test_pages_within_what_memory_holds_are_not_read_alone() -> None:
    worth = learned(1000, 1e5)
    assert worth.choose(pages_of(4), 4 * PAGE - 56, 2000).num_pages == 0
    assert learned(1000, 1e9).choose(pages_of(4), 2 * PAGE + 9, 2000).num_pages == 4


def test_always_reads_whatever_is_stored() -> None:
    worth = learned(1000, 1e5, always=True)
    choice = worth.choose(pages_of(8), 0, 8 * PAGE + 31)
    assert choice.num_pages == 8
    assert not worth.is_too_slow(choice, 100.0, 1, 8 * PAGE_NBYTES)


def test_what_takes_no_time_either_way_is_read() -> None:
    worth = learned(20_000, 2e7)  # 14 ms to compute, 50 ms to read
    choice = worth.choose(pages_of(1), 0, PAGE + 31)
    assert choice.num_pages == 1 and choice.computing < choice.seconds < LEAST_SECONDS
    assert learned(20_000, 2e6).choose(pages_of(1), 0, PAGE + 31).num_pages == 0  # 500 ms to read


def test_a_disk_that_begins_late_is_not_called_slow() -> None:
    worth = learned(1000, 1e9)
    choice = worth.choose(pages_of(8), 0, 8 * PAGE + 31)
    assert not worth.is_too_slow(choice, LEAST_SECONDS * 0.9, 16_000, 8 * PAGE_NBYTES)
    assert worth.is_too_slow(choice, LEAST_SECONDS * 1.1, 16_000, 8 * PAGE_NBYTES)
    assert worth.is_too_slow(choice, LEAST_SECONDS * 0.9, 150_000, 8 * PAGE_NBYTES)


def test_a_read_is_given_up_after_a_small_share_of_the_computing_time_if_it_lags() -> None:
    worth = learned(250, 1e9)
    choice = worth.choose(pages_of(8), 0, 8 * PAGE + 31)
    total = 8 * PAGE_NBYTES
    trial = TRIAL * choice.computing
    assert not worth.is_too_slow(choice, trial * 0.9, total // 60, total)  # too early to say
    assert worth.is_too_slow(choice, trial * 1.7, total // 60, total)
    assert not worth.is_too_slow(choice, trial * 1.7, total // 10, total)


def test_a_new_process_goes_by_what_its_processor_computed_at_the_start() -> None:
    slow, fast = (Worth(1e8, 1e4, flops=flops, chunk_tokens=512) for flops in (25e9, 100e9))
    assert slow.computing_seconds(0, 8 * PAGE) == pytest.approx(4 * fast.computing_seconds(0, 8 * PAGE))
    # A disk that brings 1 MB in 0.3 s: 8 MB take as long as 2,048 tokens on one, and too long for the other.
    for worth, gives_up in ((slow, False), (fast, True)):
        choice = worth.choose(pages_of(8), 0, 8 * PAGE + 31)
        assert choice.num_pages == 8
        assert worth.is_too_slow(choice, 0.3, 320_000, 8 * PAGE_NBYTES) == gives_up


def test_a_stall_of_a_reader_does_not_give_up_a_short_hit() -> None:
    # The first question after a restart: 37 tokens, 2 MB, nothing measured; the reader waited for a core.
    worth = Worth(2.7e8, 1e4, flops=50e9, chunk_tokens=512)
    choice = worth.choose(pages_of(1, 36), 0, 37)
    assert choice.num_pages == 1
    assert not worth.is_too_slow(choice, 0.06, 300_000, 2_000_000)


def test_a_read_in_part_is_given_up_when_it_would_end_later_than_computing() -> None:
    worth = learned(1000, 3e6)
    choice = worth.choose(pages_of(32), 0, 32 * PAGE)
    total = choice.num_pages * PAGE_NBYTES
    trial = 1.01 * TRIAL * choice.computing
    assert choice.afterwards > 0.5 * choice.computing
    assert not worth.is_too_slow(choice, trial, round(trial * 3e6), total)
    assert worth.is_too_slow(choice, 2 * trial, 300_000, total)


def test_a_refused_disk_is_tried_again_in_time() -> None:
    worth = learned(1000, 1e6)
    refused = 0
    while not worth.choose(pages_of(8), 0, 8 * PAGE + 31).num_pages:
        refused += 1
        assert refused < 100
    assert refused >= 8


def test_few_rows_and_short_reads_teach_nothing() -> None:
    worth = learned(1000, 1e9)
    before = worth.computing_seconds(0, 2000), worth.reading_seconds(PAGE_NBYTES)
    worth.note_step(31, 31 * 2000, 100.0, 100.0)
    worth.note_read(1000, 100.0)
    assert (worth.computing_seconds(0, 2000), worth.reading_seconds(PAGE_NBYTES)) == before


def test_long_prompts_cost_more_than_their_share() -> None:
    worth = Worth(2e8, 1e4, flops=50e9, chunk_tokens=512)
    worth.note_step(512, 512 * 256, 0.5, 0.1)
    assert worth.computing_seconds(7680, 8192) > 10 * 0.1 + 0.5


def _slow_choice(num_pages: int) -> Choice:
    return Choice(num_pages, num_pages, 1.0, 0.0, 1.0, "in a test")


def test_a_lagging_read_is_given_up_and_the_answer_has_the_same_bits(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(480)
    cold, _ = logits_bits(boot(), tokens)
    runtime = boot()
    read_layer = OpenPage.read_layer_into

    def crawl(page: OpenPage, layer: int, buffer: Any, count: int = 1) -> None:
        time.sleep(0.2)
        read_layer(page, layer, buffer, count)

    monkeypatch.setattr(OpenPage, "read_layer_into", crawl)
    monkeypatch.setattr(runtime.cache.worth, "choose", lambda refs, known, total: _slow_choice(len(refs)))
    monkeypatch.setattr(runtime.cache.worth, "is_too_slow", lambda choice, elapsed, nbytes, total: nbytes > 0)
    bits, stats = logits_bits(runtime, tokens)
    assert bits == cold
    assert stats.total_ms - stats.prefill_ms > 150  # what the step waited in vain is not computing
    assert stats.restored_tokens == stats.matched_tokens == 0 and stats.skipped_tokens == 479
    assert stats.computed_tokens == 480
    assert stats.load.startswith("given up after") and "given up after" in stats.miss_reason
    assert runtime.store is not None and runtime.store.usage().quarantined == 0
    monkeypatch.undo()
    again, stats = logits_bits(boot(), tokens)  # the artifacts are where they were
    assert again == cold and stats.restored_tokens == 479


def test_a_refused_hit_is_computed_with_the_same_bits_and_explained(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(480)
    cold, _ = logits_bits(boot(), tokens)
    runtime = boot()
    monkeypatch.setattr(
        runtime.cache.worth,
        "choose",
        lambda refs, known, total: Choice(0, len(refs), 1.0, 1.0, 1.0, "in a test"),
    )
    bits, stats = logits_bits(runtime, tokens)
    assert bits == cold
    assert (stats.computed_tokens, stats.skipped_tokens, stats.bytes_read) == (480, 479, 0)
    assert "479 tokens are stored, not read" in stats.miss_reason


def test_a_hit_read_in_part_has_the_same_bits(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(480)
    cold, _ = logits_bits(boot(), tokens)
    runtime = boot()
    monkeypatch.setattr(
        runtime.cache.worth,
        "choose",
        lambda refs, known, total: Choice(2, len(refs), 1.0, 0.5, 1.0, "in a test"),
    )
    bits, stats = logits_bits(runtime, tokens)
    assert bits == cold
    assert (stats.restored_tokens, stats.computed_tokens, stats.skipped_tokens) == (256, 224, 223)
    assert stats.miss_reason is None and stats.load.startswith("read in part")


def test_the_decision_is_in_the_statistics_of_an_answer(boot: Boot) -> None:
    tokens = tokens_of(400)
    boot().prefill(tokens)
    *_, finished = boot().generate(Request(tokens, 2, ignore_eos=True))
    assert finished.stats.load.startswith("read, because")  # type: ignore[union-attr]
    assert finished.stats.skipped_tokens == 0  # type: ignore[union-attr]


def test_a_timeline_has_every_layer_once(boot: Boot) -> None:
    tokens = tokens_of(400)
    runtime = boot()
    runtime.prefill(tokens)
    runtime = boot()
    sequence = runtime.cache.open(tokens)
    reading: restore.Restore | None = sequence.restore
    assert reading is not None
    sequence.prefill()
    sequence.close()
    layers = list(range(runtime.engine.geometry.num_layers))
    assert list(reading.timeline.ready) == layers
    assert reading.timeline.asked.keys() <= set(layers)  # none when it ended before the step began
    assert np.all(np.diff(list(reading.timeline.ready.values())) >= 0)


def test_a_slow_disk_is_noticed_within_a_layer(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(480)
    boot().prefill(tokens)
    monkeypatch.setattr(restore, "LEAST_PART_NBYTES", 1000)
    runtime = boot()
    asked: list[int] = []

    def is_too_slow(choice: Choice, elapsed: float, nbytes: int, num_bytes: int) -> bool:
        asked.append(nbytes)
        return nbytes >= 5000

    monkeypatch.setattr(runtime.cache.worth, "is_too_slow", is_too_slow)
    _, stats = logits_bits(runtime, tokens)
    assert asked == [1000, 2000, 3000, 4000, 5000]
    assert (stats.bytes_read, stats.restored_tokens) == (5000, 0)


def test_a_disk_is_asked_for_more_at_once_the_more_it_has_brought(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(480)
    boot().prefill(tokens)
    monkeypatch.setattr(restore, "LEAST_PART_NBYTES", 64)
    runtime = boot()
    brought: list[int] = []

    def is_too_slow(choice: Choice, elapsed: float, nbytes: int, num_bytes: int) -> bool:
        brought.append(nbytes)
        return False

    monkeypatch.setattr(runtime.cache.worth, "is_too_slow", is_too_slow)
    _, stats = logits_bits(runtime, tokens)
    parts = np.diff(sorted(set(brought)))
    assert stats.restored_tokens == 479
    assert (parts <= np.maximum(64, np.array(sorted(set(brought)))[1:] / 16)).all()
    assert parts.max() > 16 * 64


def test_nothing_is_watched_when_everything_is_read_anyway(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(480)
    boot().prefill(tokens)
    runtime = boot("cache.load=always")
    monkeypatch.setattr(runtime.cache.worth, "is_too_slow", lambda *_: True)
    _, stats = logits_bits(runtime, tokens)
    assert stats.restored_tokens == 479 and "cache.load=always" in stats.load
