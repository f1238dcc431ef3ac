"""Promise: `kestrel top` says what a running server is doing, and what is wrong when there is none."""

import os
import subprocess
import sys
from typing import Any

import pytest

from kestrel.commands.top import parse_samples, quantile
from tests.server.conftest import ROOT

HISTOGRAM = """# HELP t x
# TYPE t histogram
t_bucket{le="0.1"} 0
t_bucket{le="0.5"} 10
t_bucket{le="1.0"} 20
t_bucket{le="+Inf"} 20
t_sum 9.5
t_count 20
"""


def top(*words: str, key: str = "") -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-m", "kestrel", "top", *words],
        cwd=ROOT,
        env=os.environ | {"KESTREL_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize(("share", "seconds"), [(0.25, 0.3), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0)])
def test_quantiles_are_interpolated(share: float, seconds: float) -> None:
    assert quantile(parse_samples(HISTOGRAM), "t", share) == pytest.approx(seconds)
    assert quantile({}, "t", share) is None


def test_a_running_server(start_server: Any, tiny_words: tuple[str, ...]) -> None:
    server = start_server(*tiny_words, "server.log_format=json")
    for _ in range(2):
        server.http.post("/v1/completions", json={"prompt": [7] * 50, "max_tokens": 3, "ignore_eos": True})
    code, text = top(server.url)
    assert code == 0
    assert f"tiny at {server.url}: ok" in text
    assert "2 done: 0 stop, 2 length, 0 cancelled, 0 failed" in text
    assert "51% computed, 49% ram, 0% disk" in text


def test_no_server() -> None:
    code, text = top("127.0.0.1:9")
    assert code == 1 and "no server answers at http://127.0.0.1:9" in text and "Traceback" not in text
