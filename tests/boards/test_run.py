"""The run over emulated boards says "exact" of a board that is this very machine."""

import sys
from pathlib import Path

from tests.boards.run import ROOT, Board, Run


def test_this_machine_taken_for_a_board_is_exact_and_has_the_same_bits(tmp_path: Path) -> None:
    here = Board("this machine", (sys.executable,), {"PYTHONPATH": str(ROOT)})
    board = Board("a twin", (sys.executable,), {"PYTHONPATH": str(ROOT)})
    run = Run()
    run.compare_kernels(here, [board])
    run.try_board(board, here, ["int4"], tmp_path)
    assert run.failures == []
    report = "\n".join(run.lines)
    assert "differs" not in report and "FAILED" not in report
    assert "| equal, same namespace | equal, same namespace |" in report
    assert "| ok (its own) | ok (its own) |" in report
