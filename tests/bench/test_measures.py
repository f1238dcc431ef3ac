"""Promise: every measure ends in a table, JSON and a picture that say the same, with the machine beside them.

The models are tiny and times are never looked at.
"""

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kestrel.bench.measures import (
    attention,
    decode,
    llamacpp,
    peer,
    prefill,
    published,
    restore,
    save,
    serve,
    setting,
    speculate,
    startup,
    store,
    worth,
)
from kestrel.bench.measures.result import (
    Bars,
    Column,
    Lines,
    Result,
    Spans,
    Target,
    publish,
    table_lines,
)
from kestrel.bench.measures.synthetic import write_store
from kestrel.bench.measures.twins import KINDS, write_twin
from kestrel.bench.records import BenchError
from kestrel.cli import main
from kestrel.commands.bench import MEASURES
from kestrel.config import Config, load_config
from kestrel.models.checkpoint import open_checkpoint
from kestrel.models.fetch import resolve_model
from kestrel.store.store import Limits, Store
from tests.bench.test_process import TINY

HAS_PEER = importlib.util.find_spec("xllamacpp") is not None


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said on the way, and the machine is not asked how busy it is."""
    monkeypatch.setattr("kestrel.bench.measures.result.busy_share", lambda: 0.5)


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A model of 320 tokens of vocabulary and 1,024 of context, weights converted once."""
    return load_config(
        [
            *TINY,
            f"model.root={tmp_path_factory.getbasetemp() / 'bench-models'}",
            "cache.page_tokens=128",
            "cache.min_free_bytes=0",
            "engine.kv_ram_bytes=16MiB",
            "engine.kv_touched_bytes=0",
            "bench.repeats=1",
        ]
    )


def check(out: Path, name: str) -> dict[str, Any]:
    """What every measure leaves behind; returns its JSON."""
    record: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    text = (out / "result.md").read_text(encoding="utf-8")
    assert record["name"] == name
    assert (out / "result.png").stat().st_size > 5000
    assert record["machine"]["cores"] >= 1 and record["busy"] == [0.5, 0.5]
    assert "NOT QUIET" in text
    for column in record["columns"]:
        assert column["head"] in text
        assert any(row.get(column["key"]) is not None for row in record["rows"]), column
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(record["rows"])
    assert len({line.count("|") for line in table}) == 1
    numbers = [value for row in record["rows"] for value in row.values() if isinstance(value, float)]
    assert numbers and all(math.isfinite(value) for value in numbers)
    for target in record["targets"]:
        assert target["what"] in text
        met = target["value"] <= target["bound"] if target["at_most"] else target["value"] >= target["bound"]
        assert target["is_met"] == met
    return record


def test_restore_compares_with_reading_and_with_the_tail(config: Config, tmp_path: Path) -> None:
    restore.run(config, tmp_path)
    record = check(tmp_path, "restore")
    assert {(row["kv"], row["page_cache"]) for row in record["rows"]} == {
        (kv, state) for kv in ("float32", "int8") for state in ("dropped", "warm")
    }
    for row in record["rows"]:
        assert row["tokens"] == 1024 - setting.TAIL_TOKENS - 2
        assert row["ratio"] == pytest.approx(row["ttft_ms"] / max(row["read_ms"], row["tail_ms"]))
        assert row["speedup"] == pytest.approx(row["cold_ms"] / row["ttft_ms"])
    float32, int8 = (
        {row["megabytes"] for row in record["rows"] if row["kv"] == kv} for kv in ("float32", "int8")
    )
    assert max(int8) < 0.6 * min(float32)
    timelines = [panel for panel in record["panels"] if "lanes" in panel]
    assert len(timelines) == 4
    for panel in timelines:
        assert len(panel["lanes"]["reader"]) == 2  # a piece for each layer
        assert all(end >= begin for lane in panel["lanes"].values() for begin, end in lane)


def test_save_has_the_first_turn_decoding_and_the_bytes_of_turns(config: Config, tmp_path: Path) -> None:
    save.run(config, tmp_path)
    record = check(tmp_path, "save")
    assert [row["unit"] for row in record["rows"]] == ["ms", "tok/s", "tok/s", "MB", "MB"]
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["with"] / row["without"])
    written = record["panels"][1]["series"]["written"]
    assert len(written) == save.TURNS and all(nbytes > 0 for nbytes in written)


def test_prefill_splits_the_time(config: Config, tmp_path: Path) -> None:
    prefill.run(config, tmp_path)
    record = check(tmp_path, "prefill")
    assert [row["tokens"] for row in record["rows"]] == [512]  # 2K does not fit this model
    for row in record["rows"]:
        assert row["graphs_ms"] + row["attention_ms"] < row["ms"]
        assert row["rate"] == pytest.approx(row["tokens"] / row["ms"] * 1e3)


def test_decode_has_both_kv_dtypes_and_with_full_both_weights(config: Config, tmp_path: Path) -> None:
    decode.run(config, tmp_path, full=True)
    record = check(tmp_path, "decode")
    assert {(row["weights"], row["kv"]) for row in record["rows"]} == {
        (weights, kv) for weights in ("int8", "int4") for kv in ("float32", "int8")
    }
    for row in record["rows"]:
        assert row["graphs_ms"] + row["attention_ms"] + row["head_ms"] < 1.5 * row["ms"]


def test_speculation_is_compared_on_two_kinds_of_text(config: Config, tmp_path: Path) -> None:
    speculate.run(config, tmp_path)
    record = check(tmp_path, "speculate")
    assert [row["what"] for row in record["rows"]] == ["copies", "writes freely"]
    assert all(row["same"] == "yes" for row in record["rows"])


def test_attention_stands_beside_the_operator(config: Config, tmp_path: Path) -> None:
    attention.run(config, tmp_path)
    record = check(tmp_path, "attention")
    assert [(row["kv"], row["rows"]) for row in record["rows"]] == [
        (kv, rows) for kv in ("float32", "int8") for rows in attention.ROWS
    ]
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["ms"] / row["operator_ms"])
        assert (row["share"] is None) == (row["rows"] > 1)


def test_store_grows_by_its_sizes(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SIZES", (100, 200, 400))
    monkeypatch.setattr(store, "NUM_EVICTED", 60)
    monkeypatch.setattr(store, "NUM_FINDS", 5)
    store.run(config, tmp_path)
    record = check(tmp_path, "store")
    assert [(row["pages"], row["evicted"]) for row in record["rows"]] == [(100, 50), (200, 60)]
    assert not (tmp_path / "stores").exists()


def test_published_asks_git_and_dvc_themselves(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "SIZES", (2, 40, 70))
    monkeypatch.setattr(published, "MOST_FOR_DVC", 40)
    published.run(config, tmp_path)
    record = check(tmp_path, "published")
    assert [row["pages"] for row in record["rows"]] == [2, 40, 70]
    assert [row["status_s"] is None for row in record["rows"]] == [False, False, True]
    assert not (tmp_path / "boards").exists()


def test_made_up_stores_are_real_ones(tmp_path: Path) -> None:
    made = write_store(tmp_path / "kv", 70)
    with Store(made.root, Limits()) as opened:
        assert opened.usage().files == 70
        assert len(opened.verify().damaged) == 0
        match = opened.find_prefix(made.namespace, made.sessions[1], 256, 16)
        assert match.num_tokens == len(made.sessions[1]) and match.pages[0].key != match.pages[2].key


def test_startup_has_times_imports_and_memory(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "NUM_ARTIFACTS", 40)
    monkeypatch.setattr(startup, "NUM_SESSIONS", 2)
    startup.run(config, tmp_path)
    record = check(tmp_path, "startup")
    values = {row["what"]: row["value"] for row in record["rows"]}
    assert values["process start to listening"] > 0
    assert values["import standard library"] > 0
    assert values["RSS after all sessions"] >= values["RSS when listening"] * 0.9


def test_worth_slows_the_disk_down(config: Config, tmp_path: Path) -> None:
    worth.run(config, tmp_path)
    record = check(tmp_path, "worth")
    assert [(row["disk"], row["knows"]) for row in record["rows"]] == [
        (disk, knows) for disk in ("as it is", "1x", "0.05x") for knows in ("new", "learned")
    ]
    assert all(row["load"] for row in record["rows"])


def test_a_slow_page_takes_its_time_and_has_the_same_bytes(config: Config, tmp_path: Path) -> None:
    with setting.opened(setting.with_store(config, tmp_path / "kv")) as runtime:
        tokens = setting.prompts_for(runtime)(300)
        setting.answer(runtime, tokens)
        assert runtime.writer is not None and runtime.store is not None
        runtime.writer.drain()
        worth._slow_down(runtime, 1e6)
        setting.forget_ram(runtime)
        stats = setting.answer(runtime, tokens, persist=False)
        assert stats.restored_tokens == 299
        assert stats.restore_ms >= stats.bytes_read / 1e6 * 1e3


@pytest.mark.parametrize("recipe", KINDS)
def test_twins_hold_the_same_model(config: Config, tmp_path: Path, recipe: str) -> None:
    source, _ = resolve_model(config.model)
    twin = open_checkpoint(write_twin(source, recipe, tmp_path))
    assert twin.geometry.as_identity() == source.geometry.as_identity()
    for name in ("layers.0.q", "layers.1.k", "layers.0.down", "embed", "norm"):
        expected, found = source.tensor(name), twin.tensor(name)
        assert abs(found - expected).max() < (0.01 if recipe == "int8" else 0.1) * abs(expected).max()
    assert len(twin.tokenizer().encode("any text")) > 0


def test_no_twin_for_float32(config: Config, tmp_path: Path) -> None:
    source, _ = resolve_model(config.model)
    with pytest.raises(BenchError, match="float32 has no counterpart"):
        write_twin(source, "float32", tmp_path)


@pytest.mark.skipif(not HAS_PEER, reason="needs the bench extra")
def test_llama_cpp_runs_a_twin_and_restores_its_session(config: Config, tmp_path: Path) -> None:
    source, _ = resolve_model(config.model)
    twin = write_twin(source, "int8", tmp_path)
    (tmp_path / "slots").mkdir()
    flags = llamacpp.Flags(str(twin), 512, 1, False, "f16", str(tmp_path / "slots"))
    prompt = setting.Prompts(320)(100)
    with llamacpp.LlamaServer(flags, tmp_path / "first.log") as server:
        _, timings = server.complete(prompt, 5)
        assert (timings["prompt_n"], timings["predicted_n"]) == (100, 5)
        assert server.save() > 0
    with llamacpp.LlamaServer(flags, tmp_path / "second.log") as server:
        assert server.restore() > 0
        _, timings = server.complete([*prompt, 300, 301], 1)
        assert timings["prompt_n"] <= 3


def test_kestrel_is_compared_with_the_best_of_llama_cpp() -> None:
    times: peer.Times = {
        ("prefill", 512, "kestrel int8 KV"): [300.0, 100.0, 200.0],
        ("prefill", 512, "llama f16"): [90.0],
        ("prefill", 512, "llama q8_0"): [100.0],
        ("restart, files as they were left", 2040, "kestrel int8 KV"): [50.0],
        ("restart, files as they were left", 2040, "llama f16"): [90.0],
        ("restart, files as they were left", 2040, "llama q8_0"): [100.0],
    }
    fast, restart = peer._rows(times, "int8")
    assert (fast["kestrel"], fast["llama"], fast["llama_variant"], fast["ratio"]) == (
        200.0,
        100.0,
        "q8_0",
        2.0,
    )
    assert (restart["llama"], restart["llama_variant"]) == (90.0, "f16")
    assert [target.is_met for target in peer._targets([fast, restart])] == [True, True]


def test_a_result_is_written_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = (Column("what", "what"), Column("ms", "ms", "{:,.1f}"))
    rows = [{"what": "one", "ms": 1234.56}, {"what": "another"}]
    assert table_lines(columns, rows) == [
        "| what    |      ms |",
        "| ------- | ------: |",
        "| one     | 1,234.6 |",
        "| another |         |",
    ]
    panels = (
        Bars("bars", "ms", ["one", "another"], {"ms": [1234.56, None]}),
        Lines("lines", "x", "y", {"a": [(1, 1), (10, 3)]}),
        Spans("spans", {"lane": [(0, 1), (2, 3)]}),
    )
    targets = (Target("ms", 3.0, 2.0), Target("rate", 3.0, 2.0, at_most=False))
    publish(Result("name", "Title", {"model": "m"}, columns, rows, targets, panels, ("a note",)), tmp_path)
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "- MISSED: ms: 3 (target <= 2)" in text and "- met: rate: 3 (target >= 2)" in text
    assert "- a note" in text and text in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == rows


def test_contexts_fit_the_model() -> None:
    assert setting.fitting((2040, 8100), 40960, 33) == [2040, 8100]
    assert setting.fitting((2040, 8100), 8100, 33) == [2040]
    assert setting.fitting((2040, 8100), 512, 33) == [479]


def test_prompts_begin_differently_and_leave_out_what_is_refused() -> None:
    prompts = setting.Prompts(1000, refused=[500])
    assert all(500 not in prompt and min(prompt) >= 300 for prompt in (prompts(2000), prompts(2000)))
    assert prompts(50)[:8] != prompts(50)[:8]


def test_serve_has_streams_side_by_side_and_beside_a_prompt(config: Config, tmp_path: Path) -> None:
    serve.run(config, tmp_path)
    record = check(tmp_path, "serve")
    *streams, beside = record["rows"]
    assert [row["streams"] for row in streams] == list(serve.STREAMS)
    for row in streams:
        assert row["speedup"] == pytest.approx(row["rate"] / streams[0]["rate"])
    assert beside["prompt"] == 1024 - 2
    assert beside["p95_ms"] / beside["chunk_ms"] == pytest.approx(beside["ratio"])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_can_be_named(name: str) -> None:
    module = importlib.import_module(f"kestrel.bench.{MEASURES[name].module}")
    assert callable(module.run)


def test_the_command_knows_its_measures(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["bench", "restor"], "there is no measure 'restor'; choose one of restore, save"),
        (["bench", "--full"], "--full belongs to a MEASURE"),
        (["bench", "quality", "--full"], "quality has one size"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in MEASURES)
