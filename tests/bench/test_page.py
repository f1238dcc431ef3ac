"""The HTML report needs nothing but itself, and keeps the numbers of two boards apart."""

import copy
import json
import re
from pathlib import Path

import pytest

from kestrel.bench.page import load_board, render_page
from kestrel.bench.records import BenchError, Cell
from kestrel.bench.report import TTFT_PIECES, build_report, ratio

RECORDED = Path(__file__).parent / "recorded"
CELL = Cell(RECORDED / "first.json", RECORDED, RECORDED)


def test_it_is_self_contained_and_has_every_number() -> None:
    report = build_report([CELL])
    page = render_page(report, [])
    assert not re.search(r"https?://|src=|href=|<script|@import|url\(", page)
    (cell,) = report.contexts
    for caliber in ("prefill", "ttft", "wall"):
        assert ratio(cell.speedup[caliber]) in page
    for words in (
        *(piece.name for piece in TTFT_PIECES),
        "Where the time of a cold run goes",
        "Bytes a turn",
    ):
        assert words in page
    assert report.machine.cpu in page and report.machine.instructions in page and 'class="bad"' not in page


def test_another_board_has_a_section_of_its_own() -> None:
    report = build_report([CELL])
    other = copy.deepcopy(report.as_json())
    other["machine"]["cpu"] = "RK3588 <board>"
    other["contexts"][0]["identical_text"] = False
    page = render_page(report, [other])
    ours, theirs = page.split("Another board: RK3588 &lt;board&gt;")
    assert 'class="bad"' not in ours and 'class="bad"' in theirs


def test_a_board_s_report_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    data = build_report([CELL]).as_json()
    path = tmp_path / "board.json"
    path.write_text(json.dumps(data))
    assert load_board(path) == json.loads(json.dumps(data))
    del data["contexts"][0]["cold"]["parts"]
    path.write_text(json.dumps(data))
    with pytest.raises(BenchError, match="board.json: expected the report.json of a board with this version"):
        load_board(path)
