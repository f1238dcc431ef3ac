"""A report says what was measured: every ratio from two times of one caliber, and no success where there is none."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.bench.chart import draw_report
from kestrel.bench.records import BenchError
from kestrel.bench.report import (
    build_report,
    check_report,
    duration,
    failures,
    markdown,
    metrics,
    one_line,
    ratio,
    save_report,
)

RECORDED = Path(__file__).parent / "recorded"  # a real run: SmolLM2-135M, 1,024 tokens

Edit = Callable[[str, Callable[[dict[str, Any]], None]], Path]


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """Copy the recorded cell, change one of its files, and return the folder."""

    def edited(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        folder = tmp_path / "records"
        shutil.copytree(RECORDED, folder, dirs_exist_ok=True)
        record = json.loads((folder / name).read_text())
        change(record)
        (folder / name).write_text(json.dumps(record))
        return folder

    return edited


def recorded_run(name: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((RECORDED / name).read_text())["run"]
    return run


def test_ratios_are_of_one_caliber() -> None:
    (cell,) = build_report([RECORDED]).contexts
    cold, restored, control = (recorded_run(name) for name in ("cold.json", "restored.json", "control.json"))
    for caliber in ("prefill", "ttft", "wall"):
        fast = restored[f"{caliber}_ms"]
        assert cell.speedup[caliber] == round(cold[f"{caliber}_ms"] / fast, 2)
        assert cell.speedup_over_control[caliber] == round(control[f"{caliber}_ms"] / fast, 2)


def test_the_recorded_run_kept_its_promises() -> None:
    report = build_report([RECORDED])
    (cell,) = report.contexts
    assert cell.identical_text and cell.fact_recalled
    assert cell.cold.cached_tokens == cell.control.cached_tokens == 0
    assert cell.restored.cached_tokens + cell.restored.computed_tokens == cell.restored.prompt_tokens
    assert failures(report) == []
    check_report(report)


def test_a_different_text_fails(edit: Edit) -> None:
    folder = edit("control.json", lambda record: record["run"].update(text="Paris."))
    report = build_report([folder])
    assert report.contexts[0].identical_text is False
    with pytest.raises(
        BenchError, match="differs from the control's\n  restored: .*Tokyo.*\n  control:  'Paris.'"
    ):
        check_report(report)


def test_nothing_restored_fails_and_says_why(edit: Edit) -> None:
    folder = edit("restored.json", lambda record: record["run"].update(cached_tokens=0, miss_reason="empty"))
    with pytest.raises(BenchError, match=r"smollm2-135m-1024: nothing was restored \(empty\)"):
        check_report(build_report([folder]))


def test_a_forgotten_fact_is_reported_but_no_failure(edit: Edit) -> None:
    edit("control.json", lambda record: record["run"].update(text="Rome."))
    folder = edit("restored.json", lambda record: None)
    for name in ("restored.json", "control.json"):
        record = json.loads((folder / name).read_text())
        record["run"]["text"] = "Rome."
        (folder / name).write_text(json.dumps(record))
    report = build_report([folder])
    assert report.contexts[0].fact_recalled is False
    assert failures(report) == []
    assert "not recalled (expected Tokyo)" in markdown(report)


def test_runs_of_two_machines_are_not_compared(edit: Edit) -> None:
    folder = edit("control.json", lambda record: record["machine"].update(cores=64))
    with pytest.raises(BenchError, match="measured on two machines .cores: "):
        build_report([folder])


def test_runs_of_two_experiments_are_not_compared(edit: Edit) -> None:
    folder = edit("cold.json", lambda record: record["run"].update(text="another answer"))
    with pytest.raises(BenchError, match="of two experiments"):
        build_report([folder])


def test_a_busy_machine_is_named(edit: Edit) -> None:
    folder = edit("restored.json", lambda record: record["run"].update(busy=0.63))
    assert "63% before S2" in markdown(build_report([folder]))


def test_everything_is_written(tmp_path: Path) -> None:
    report = build_report([RECORDED, RECORDED])
    save_report(report, tmp_path)
    draw_report(report, tmp_path / "report.png")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == json.loads(json.dumps(dataclasses.asdict(report)))
    assert set(saved["machine"]) >= {
        "cpu",
        "cores",
        "memory_bytes",
        "os",
        "python",
        "onnxruntime",
        "numba",
        "kestrel",
    }
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics(report)
    assert len((tmp_path / "calibers.csv").read_text().splitlines()) == 1 + 2 * 3 * 3
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "report.md").read_text()
    for words in ("| prefill", "| TTFT", "| wall", "S1 cold (n=1,024)", "S2 restored (n=22)"):
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
