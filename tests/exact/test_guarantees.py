"""The exactness check passes where all bits agree, and names the guarantee that any kind of inexactness breaks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel.cache import restore
from kestrel.cli import main
from kestrel.config import Config, load_config
from kestrel.engine.engine import Engine, Span
from kestrel.errors import KestrelError
from kestrel.exactness import guarantees
from kestrel.exactness.guarantees import Guarantee, check, compare_processes, compare_ways, run_trial
from kestrel.exactness.ways import Observation, Trial, observe
from tests.engine.conftest import TINY

RESTORED = {
    "restored at a page boundary",
    "restored inside a page",
    "restored but for one",
    "restored one token",
}


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        [
            f"model.path={TINY / 'qwen3'}",
            f"model.root={tmp_path / 'models'}",
            "engine.kv_ram_bytes=64MiB",
            *overrides,
        ]
    )


def broken(seen: Observation) -> set[str]:
    return {one.name for one in compare_ways({seen.kv: seen}) if not one.holds}


def test_every_guarantee_holds_here_with_both_kv_dtypes(tmp_path: Path) -> None:
    found = list(check(config_of(tmp_path, "engine=int4"), splits=2))
    assert [one.name for one in found if not one.holds] == []
    assert {"kernels", "split", "strangers", "decoded", "threads", "restart", "probe"} | RESTORED == {
        one.name for one in found
    }
    assert all(one.kept == {"float32": True, "int8": True} for one in found)


def test_rows_that_feel_their_company_break_every_guarantee_but_that_of_the_start_up_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Engine.forward

    def crooked(self: Engine, spans: Sequence[Span], *more: Any) -> np.ndarray:
        logits = forward(self, spans, *more)
        return logits + np.float32(1e-6) * np.float32(sum(len(span.tokens) for span in spans))

    monkeypatch.setattr(Engine, "forward", crooked)
    seen = observe(Trial(config_of(tmp_path), tmp_path / "kv", "all"), "int8")
    assert broken(seen) >= {"split", "strangers", "decoded", "restored but for one"}


def test_a_restore_that_brings_other_bytes_breaks_the_restored_guarantees_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_layers = restore.read_layers

    def crooked(pool: Any, page: Any, ref: Any, layers: range, table: Any) -> int:
        nbytes = read_layers(pool, page, ref, layers, table)
        if 0 in layers and ref.first == 0:
            pool.layer_block(table[0], 0)[0] ^= 1  # the first value of the first row of K
        return nbytes

    monkeypatch.setattr(restore, "read_layers", crooked)
    seen = observe(Trial(config_of(tmp_path), tmp_path / "kv", "all"), "float32")
    assert broken(seen) == RESTORED


def test_a_second_process_with_other_bits_or_another_probe_is_noticed() -> None:
    facts: dict[str, int | str | bool] = {"threads": 2, "probe": "a", "exact": True, "least_rows": 1}
    one = Observation("int8", {"whole": "1", "restored but for one": "1"}, facts)
    for digests, probe, names in (
        ({}, "a", set()),
        ({"whole": "2"}, "a", {"threads"}),
        ({"restored but for one": "2"}, "a", {"restart"}),
        ({}, "b", {"probe"}),
    ):
        other = replace(
            one, digests={**one.digests, **digests}, facts={**facts, "probe": probe, "threads": 1}
        )
        found = compare_processes({"int8": one}, {"int8": other})
        assert {guarantee.name for guarantee in found if not guarantee.holds} == names


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.context_tokens=200")
    with pytest.raises(KestrelError, match="takes a context of 320 tokens, found 200"):
        run_trial(Trial(config, tmp_path / "kv", "whole"), (guarantees.sys.executable,))


@pytest.mark.parametrize("holds", [True, False])
def test_doctor_exact_exits_1_when_a_guarantee_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holds: bool
) -> None:
    def found(config: Config) -> Iterator[Guarantee]:
        yield Guarantee("split", "computed in odd steps", {"float32": True, "int8": holds}, "other bits")

    monkeypatch.setattr(guarantees, "check", found)
    words = [
        f"model.path={TINY / 'qwen3'}",
        f"model.root={tmp_path / 'models'}",
        f"cache.root={tmp_path / 'kv'}",
    ]
    assert main(["doctor", "--exact", "--json", *words]) == (0 if holds else 1)
    report = json.loads(capsys.readouterr().out)
    texts = [one["text"] for one in report["findings"] if one["topic"] == "exact"]
    shown = "float32 KV ok, int8 KV ok" if holds else "float32 KV ok, int8 KV BROKEN; other bits"
    assert texts[0] == f"computed in odd steps: {shown}"
