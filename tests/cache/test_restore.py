"""A restored prefix gives the bits of a cold run, wherever it ends and whatever became of its files."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from kestrel.runtime import Delta, Request, Runtime
from tests.cache.conftest import Boot, logits_bits, tokens_of

PROMPT = tokens_of(420)


def artifacts(runtime: Runtime) -> list[Path]:
    """The artifact files, in order of position."""
    assert runtime.store is not None
    rows = sorted(runtime.store.list_pages(), key=lambda row: row.first)
    return [runtime.store.page_path(row.namespace, row.key) for row in rows]


@pytest.mark.parametrize(
    "weights, kv", [("int8", "float32"), ("int4", "float32"), ("float32", "float32"), ("int8", "int8")]
)
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "qwen3moe", "qwen3vl"])
def test_every_length_of_match_gives_the_bits_of_a_cold_run(
    boot: Boot, model: str, weights: str, kv: str
) -> None:
    engine = (f"engine={weights}", f"engine.kv={kv}")
    logits_bits(boot(*engine, model=model), PROMPT, further=0)
    cold = {}
    cases = {"one token": 17, "inside a page": 200, "page boundary": 256, "one more": 257, "n-1": 420}
    runtime = boot("cache=off", *engine, model=model)
    for name, length in cases.items():
        prompt = PROMPT[:length] + ([] if name == "n-1" else tokens_of(30, seed=length))
        cold[name] = logits_bits(runtime, prompt)[0]
    for name, length in cases.items():
        runtime = boot(*engine, model=model)
        prompt = PROMPT[:length] + ([] if name == "n-1" else tokens_of(30, seed=length))
        bits, stats = logits_bits(runtime, prompt)
        assert bits == cold[name]
        assert stats.restored_tokens == min(length, len(prompt) - 1)
        assert stats.ram_tokens == 0 and stats.computed_tokens == len(prompt) - stats.restored_tokens


def test_an_identical_prompt_resent_after_a_restart_computes_one_token(boot: Boot) -> None:
    first = logits_bits(boot(), PROMPT)
    again = logits_bits(boot(), PROMPT)
    assert again[0] == first[0]
    assert again[1].computed_tokens == 1 and again[1].bytes_read > 0


def test_an_answer_continues_after_a_restart_as_it_would_have_without(boot: Boot) -> None:
    def answer(runtime: Runtime, tokens: list[int]) -> list[int]:
        events = runtime.generate(Request(tokens, 40, ignore_eos=True))
        return [token for event in events if isinstance(event, Delta) for token in event.tokens]

    runtime = boot()
    first = answer(runtime, PROMPT)
    follow_up = PROMPT + first + tokens_of(50, seed=9)
    restored_runtime = boot()
    restored = answer(restored_runtime, follow_up)
    assert any("loaded 459-token KV prefix" in line for line in restored_runtime.lines)
    assert restored == answer(boot("cache=off"), follow_up)


def test_pages_of_another_size_are_restored_too(boot: Boot) -> None:
    cold, _ = logits_bits(boot("cache=off"), PROMPT)
    logits_bits(boot("cache.page_tokens=384"), PROMPT[:400])
    bits, stats = logits_bits(boot("cache.page_tokens=128"), PROMPT)
    assert bits == cold and stats.restored_tokens == 400
    bits, stats = logits_bits(boot("cache.page_tokens=256"), PROMPT)
    assert bits == cold and stats.restored_tokens == 419


@pytest.mark.parametrize(
    "other",
    [
        {"model": "llama"},
        {"overrides": ("engine=int4",)},
        {"overrides": ("engine=float32",)},
        {"overrides": ("engine.kv=int8",)},
    ],
)
def test_another_model_or_quantisation_never_hits(boot: Boot, other: dict) -> None:
    logits_bits(boot(), PROMPT)
    _, stats = logits_bits(boot(*other.get("overrides", ()), model=other.get("model", "qwen3")), PROMPT)
    assert stats.matched_tokens == 0 and stats.computed_tokens == len(PROMPT)
    assert stats.miss_reason


def test_other_weights_of_the_same_geometry_never_hit(boot: Boot, tmp_path: Path) -> None:
    from tests.engine.conftest import TINY

    twin = tmp_path / "twin"
    shutil.copytree(TINY / "qwen3", twin)
    shard = sorted(twin.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 0x80  # the lowest exponent bit of one weight
    shard.write_bytes(content)
    logits_bits(boot(), PROMPT)
    _, stats = logits_bits(boot(f"model.path={twin}"), PROMPT)
    assert stats.matched_tokens == 0


def flip_late_layer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-len(content) // 8] ^= 4  # in the last layer: the step has begun when it is read
    path.write_bytes(content)


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_foreign(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(5000))


def swap_with_next(path: Path) -> None:
    others = [p for p in path.parent.parent.glob("*/*.safetensors") if p != path]
    content = others[0].read_bytes()
    path.unlink()
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def make_unreadable_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        flip_late_layer,
        flip_header,
        truncate,
        empty,
        replace_by_foreign,
        swap_with_next,
        remove,
        make_unreadable_folder,
    ],
)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_damaged_page_shortens_the_hit_and_nothing_else(boot: Boot, damage: object, number: int) -> None:
    cold, _ = logits_bits(boot(), PROMPT)
    damage(artifacts(boot())[number])  # type: ignore[operator]
    runtime = boot()
    bits, stats = logits_bits(runtime, PROMPT)
    assert bits == cold
    assert stats.restored_tokens == number * 128
    bits, stats = logits_bits(boot(), PROMPT)  # what was recomputed was saved again
    assert bits == cold and stats.computed_tokens == 1


def test_of_two_damaged_pages_the_first_one_ends_the_hit_though_its_damage_is_met_last(boot: Boot) -> None:
    cold, _ = logits_bits(boot(), PROMPT)
    files = artifacts(boot())
    flip_late_layer(files[1])
    content = bytearray(files[2].read_bytes())
    content[-len(content) // 2 - len(content) // 4] ^= 4  # in the first layer
    files[2].write_bytes(content)
    bits, stats = logits_bits(boot(), PROMPT)
    assert bits == cold
    assert stats.restored_tokens == 128


def test_damage_met_while_running_is_quarantined_with_one_log_line(
    boot: Boot, caplog: pytest.LogCaptureFixture
) -> None:
    logits_bits(boot(), PROMPT)
    runtime = boot()
    victim = artifacts(runtime)[1]
    flip_late_layer(victim)
    logits_bits(runtime, PROMPT)
    logits_bits(runtime, PROMPT)
    assert runtime.store is not None and runtime.store.usage().quarantined == 1
    assert len([record for record in caplog.records if victim.name in record.getMessage()]) == 1


def test_a_page_under_another_parent_is_not_mistaken_for_this_prefix(boot: Boot) -> None:
    shared = tokens_of(128, seed=3)  # the same tokens at the same place of two prefixes
    logits_bits(boot(), tokens_of(128, seed=1) + shared + [5] * 10)
    runtime = boot()
    _, stats = logits_bits(runtime, tokens_of(128, seed=2) + shared + [5] * 10)
    assert stats.matched_tokens == 0


def test_bytes_in_the_store_are_the_same_whatever_the_history_was(boot: Boot, tmp_path: Path) -> None:
    def files(root: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}

    logits_bits(boot(), PROMPT, further=0)
    whole = files(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    runtime = boot("engine.chunk_tokens=37")
    for end in (50, 60, 200, 256, 420):
        logits_bits(runtime, PROMPT[:end], further=0)
        runtime = boot("engine.chunk_tokens=37")
    runtime.close()
    assert files(tmp_path / "kv") == whole


def test_layers_are_handed_over_one_by_one(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrel.cache import restore

    logits_bits(boot(), PROMPT)
    runtime = boot()
    gate, seen = threading.Event(), []
    read_layers = restore.read_layers

    def gated(pool: object, page: object, ref: object, layers: range, table: object) -> int:
        if 1 in layers:
            gate.wait(10)  # the reader stands before layer 1 until layer 0 has been used
        return read_layers(pool, page, ref, layers, table)

    monkeypatch.setattr(restore, "read_layers", gated)
    forward = runtime.engine.forward

    def watched(spans: object, layer_ready: object = None) -> np.ndarray:
        def ready(layer: int) -> None:
            seen.append(layer)
            if layer == 1:
                gate.set()
            layer_ready(layer)

        return forward(spans, None if layer_ready is None else ready)

    monkeypatch.setattr(runtime.engine, "forward", watched)
    _, stats = logits_bits(runtime, PROMPT)
    assert seen == [0, 1, 2] and stats.computed_tokens == 1


def test_the_metadata_of_an_artifact_is_canonical_json(boot: Boot) -> None:
    runtime = boot()
    logits_bits(runtime, PROMPT)
    raw = artifacts(runtime)[0].read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header["__metadata__"]["kestrel"]
    assert metadata == json.dumps(json.loads(metadata), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("num_allowed", [0, 2])
def test_a_process_that_may_have_no_more_threads_restores_all_the_same(
    boot: Boot, monkeypatch: pytest.MonkeyPatch, num_allowed: int
) -> None:
    bits, _ = logits_bits(boot(), PROMPT)
    runtime = boot()
    start, started = threading.Thread.start, []

    def limited(self):
        if self.name == "kestrel-restore":
            if len(started) == num_allowed:
                raise RuntimeError("can't start new thread")
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    again, stats = logits_bits(runtime, PROMPT)
    assert (again, len(started), stats.restored_tokens > 0) == (bits, num_allowed, True)
