"""The HTML report needs nothing but itself, and keeps the numbers of two boards apart."""

import copy
import re
from pathlib import Path

from kestrel.bench.page import render_page
from kestrel.bench.report import build_report, ratio

RECORDED = Path(__file__).parent / "recorded"


def test_it_is_self_contained_and_has_every_number() -> None:
    report = build_report([RECORDED])
    page = render_page(report, [])
    assert not re.search(r"https?://|src=|href=|<script|@import|url\(", page)
    (cell,) = report.contexts
    for caliber in ("prefill", "ttft", "wall"):
        assert ratio(cell.speedup[caliber]) in page
    assert report.machine.cpu in page and 'class="bad"' not in page


def test_another_board_has_a_section_of_its_own() -> None:
    report = build_report([RECORDED])
    other = copy.deepcopy(report.as_json())
    other["machine"]["cpu"] = "RK3588 <board>"
    other["contexts"][0]["identical_text"] = False
    page = render_page(report, [other])
    ours, theirs = page.split("Another board: RK3588 &lt;board&gt;")
    assert 'class="bad"' not in ours and 'class="bad"' in theirs
