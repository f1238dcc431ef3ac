"""A report says what was measured: every ratio from two times of one caliber, and no success where there is none."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.bench.chart import draw_breakdown, draw_report
from kestrel.bench.figures import figures
from kestrel.bench.records import BenchError, Cell
from kestrel.bench.report import (
    COLD_PIECES,
    TTFT_PIECES,
    Piece,
    build_report,
    check_report,
    duration,
    failures,
    markdown,
    metrics,
    one_line,
    pieces_ms,
    ratio,
    save_report,
)

RECORDED = Path(__file__).parent / "recorded"  # a real run: SmolLM2-135M, 1,024 tokens
CELL = Cell(RECORDED / "first.json", RECORDED, RECORDED)

Edit = Callable[[str, Callable[[dict[str, Any]], None]], Cell]


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """Copy the recorded cell, change one of its files, and return where it is."""

    def edited(name: str, change: Callable[[dict[str, Any]], None]) -> Cell:
        folder = tmp_path / "records"
        shutil.copytree(RECORDED, folder, dirs_exist_ok=True)
        record = json.loads((folder / name).read_text())
        change(record)
        (folder / name).write_text(json.dumps(record))
        return Cell(folder / "first.json", folder, folder)

    return edited


def recorded_run(name: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((RECORDED / name).read_text())["run"]
    return run


def test_ratios_are_of_one_caliber() -> None:
    (cell,) = build_report([CELL]).contexts
    cold, restored, control = (recorded_run(name) for name in ("cold.json", "restored.json", "control.json"))
    for caliber in ("prefill", "ttft", "wall"):
        fast = restored[f"{caliber}_ms"]
        assert cell.speedup[caliber] == round(cold[f"{caliber}_ms"] / fast, 2)
        assert cell.speedup_over_control[caliber] == round(control[f"{caliber}_ms"] / fast, 2)


def test_the_recorded_run_kept_its_promises() -> None:
    report = build_report([CELL])
    (cell,) = report.contexts
    assert cell.identical_text and cell.fact_recalled
    assert cell.cold.cached_tokens == cell.control.cached_tokens == 0
    assert cell.restored.cached_tokens + cell.restored.computed_tokens == cell.restored.prompt_tokens
    assert failures(report) == []
    check_report(report)


def test_a_different_text_fails(edit: Edit) -> None:
    cell = edit("control.json", lambda record: record["run"].update(text="Paris."))
    report = build_report([cell])
    assert report.contexts[0].identical_text is False
    with pytest.raises(
        BenchError, match="differs from the control's\n  restored: .*Tokyo.*\n  control:  'Paris.'"
    ):
        check_report(report)


def test_nothing_restored_fails_and_says_why(edit: Edit) -> None:
    cell = edit("restored.json", lambda record: record["run"].update(cached_tokens=0, miss_reason="empty"))
    with pytest.raises(BenchError, match=r"smollm2-135m-1024-float32: nothing was restored \(empty\)"):
        check_report(build_report([cell]))


def test_a_forgotten_fact_is_reported_but_no_failure(edit: Edit) -> None:
    edit("control.json", lambda record: record["run"].update(text="Rome."))
    cell = edit("restored.json", lambda record: None)
    for name in ("restored.json", "control.json"):
        record = json.loads((cell.records / name).read_text())
        record["run"]["text"] = "Rome."
        (cell.records / name).write_text(json.dumps(record))
    report = build_report([cell])
    assert report.contexts[0].fact_recalled is False
    assert failures(report) == []
    assert "not recalled (expected Tokyo)" in markdown(report)


def test_runs_of_two_machines_are_not_compared(edit: Edit) -> None:
    cell = edit("control.json", lambda record: record["machine"].update(cores=64))
    with pytest.raises(BenchError, match="measured on two machines .cores: "):
        build_report([cell])


def test_runs_of_two_experiments_are_not_compared(edit: Edit) -> None:
    cell = edit("cold.json", lambda record: record["run"].update(text="another answer"))
    with pytest.raises(BenchError, match="of two experiments"):
        build_report([cell])


def test_a_busy_machine_is_named(edit: Edit) -> None:
    cell = edit("restored.json", lambda record: record["run"].update(busy=0.63))
    assert "63% before S2" in markdown(build_report([cell]))


@pytest.mark.parametrize("pieces", (TTFT_PIECES, COLD_PIECES))
def test_the_pieces_of_a_run_add_up_to_its_time_to_the_first_token(pieces: tuple[Piece, ...]) -> None:
    (cell,) = build_report([CELL]).contexts
    for run in (cell.cold, cell.restored, cell.control):
        assert sum(pieces_ms(vars(run.parts), pieces)) == pytest.approx(run.ttft_ms, abs=0.01)
        assert min(vars(run.parts).values()) >= 0


def test_metrics_hold_the_pieces_and_the_bytes_of_a_turn() -> None:
    report = build_report([CELL])
    numbers, run = metrics(report)["smollm2-135m-1024-float32"], report.contexts[0].restored
    of_the_restored = [value for name, value in numbers.items() if name.startswith("restored_ttft_")]
    assert sum(of_the_restored) == pytest.approx(2 * run.ttft_ms, abs=0.01)  # the whole and its pieces
    assert numbers["restored_bytes_written"] == run.bytes_written < numbers["cold_bytes_written"]
    assert numbers["cold_ttft_matmul_ms"] > numbers["cold_ttft_attention_ms"] > 0


def test_bars_are_as_long_as_what_they_show(edit: Edit) -> None:
    other = edit("cold.json", lambda record: record.update(kv="int8"))
    report = build_report([CELL, other])
    speedups, first_tokens, closer, cold, nbytes = figures(report.as_json())
    (cell, _) = report.contexts
    assert [bars[0].blocks[0].amount for _, bars in speedups.groups] == list(cell.speedup.values())
    assert {bar.name for bar in closer.bars} == {"1,024 tokens, float32 KV", "1,024 tokens, int8 KV"}
    lengths = [sum(block.amount for block in bar.blocks) for bar in first_tokens.bars[:3]]
    times = [run.ttft_ms for run in (cell.cold, cell.control, cell.restored)]
    assert lengths == pytest.approx(times, abs=0.01)
    assert sum(block.amount for block in cold.bars[0].blocks) == pytest.approx(100, abs=0.01)
    assert [bars[0].blocks[0].amount for _, bars in nbytes.groups] == [
        cell.cold.bytes_written,
        cell.restored.bytes_read,
        cell.restored.bytes_written,
    ]


def test_everything_is_written(tmp_path: Path, edit: Edit) -> None:
    other = edit("cold.json", lambda record: record.update(kv="int8"))
    report = build_report([CELL, other])
    save_report(report, tmp_path)
    draw_report(report, tmp_path / "report.png")
    draw_breakdown(report, tmp_path / "breakdown.png")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == json.loads(json.dumps(dataclasses.asdict(report)))
    assert set(saved["machine"]) >= {
        "cpu",
        "instructions",
        "cores",
        "memory_bytes",
        "os",
        "python",
        "onnxruntime",
        "numba",
        "kestrel",
    }
    saved_metrics = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "metrics").iterdir()}
    assert saved_metrics == metrics(report) and len(saved_metrics) == 2
    assert len((tmp_path / "calibers.csv").read_text().splitlines()) == 1 + 2 * 3 * 3
    for name in ("report.png", "breakdown.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "report.md").read_text()
    for words in ("| prefill", "| TTFT", "| wall", "| attention", "S1 cold (n=1,024)", "S2 restored (n=22)"):
        assert words in table


@pytest.mark.parametrize(
    ("value", "text"),
    ((0.04, "0.0 ms"), (7.44, "7.4 ms"), (41.2, "41 ms"), (999.0, "999 ms"), (46370.0, "46.37 s")),
)
def test_durations_read_well(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(("value", "text"), ((None, "–"), (0.97, "1.0x"), (23.6, "23.6x"), (193.4, "193x")))
def test_ratios_read_well(value: float | None, text: str) -> None:
    assert ratio(value) == text


def test_long_answers_are_quoted_on_one_line() -> None:
    assert one_line(" a\n\nb ") == "a b"
    assert one_line("word " * 100) == ("word " * 32)[:159] + "…"
