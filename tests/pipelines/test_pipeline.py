"""`dvc repro` measures a restart in a clean clone, once, and reruns just what an edit touches."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

PROMPT = "tiny-500"
CELLS = ("tiny-500-float32", "tiny-500-int8")
RESULTS = (
    "breakdown.png",
    "calibers.csv",
    "metrics/tiny-500-float32.json",
    "metrics/tiny-500-int8.json",
    "report.html",
    "report.json",
    "report.md",
    "report.png",
)
ROOT = Path(__file__).parent.parent.parent
WHAT_GIT_HOLDS = (
    ".dvc/config",
    ".dvc/.gitignore",
    ".dvcignore",
    "artifacts/.gitignore",
    "artifacts/prompts",
    "conf",
    "dvc.yaml",
    "kestrel",
    "params.yaml",
    "pipelines",
)
TINY_MODEL = """\
defaults: [custom, _self_]
declared:
  name: tiny
  wheel: null
  random_seed: 7
  geometry:
    architecture: llama
    num_layers: 2
    hidden_size: 64
    num_heads: 4
    num_kv_heads: 2
    head_dim: 16
    ffn_size: 128
    vocab_size: 320
    context_tokens: 1024
    rope_theta: 10000.0
    norm_eps: 1.0e-5
    qkv_bias: false
    qk_norm: false
    tied_head: true
"""
TINY_PREFIXES = """\
house:
  text: Every person lives in a house of their own, and every house has a number that is never given twice.
  file: null
  role: null
cats:
  text: There are cats in some of the houses. A cat has no number, but it may have a name, and often it has several.
  file: null
  role: null
"""


@dataclass(frozen=True)
class Clone:
    """A work tree and the commands run in it."""

    root: Path

    def run(self, *command: str) -> str:
        """Standard output of a command; its failure fails the test with everything it printed."""
        done = self.attempt(*command)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def attempt(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command, whatever becomes of it. `python` and `dvc` are those that run the tests."""
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
            # Python runs the code under test where it lies, not its copy: compiled kernels are kept by path.
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=300
        )

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that occurs once in a file."""
        path = self.root / name
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}"
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """What git holds, with params.yaml asking for the tiny model, after one `dvc repro`."""
    root = tmp_path_factory.mktemp("clone")
    for name in WHAT_GIT_HOLDS:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    (root / "conf/model/tiny.yaml").write_text(TINY_MODEL)
    (root / "conf/prefixes/tiny.yaml").write_text(TINY_PREFIXES)
    (root / "params.yaml").write_text(
        "models: [tiny]\ncontexts: [500]\nkv: [float32, int8]\nprefixes: [tiny]\nengine: int8\ncache: default\n"
        "overrides: bench.answer_tokens=8\n"
    )
    clone = Clone(root)
    clone.run("git", "init", "--quiet")
    clone.run("git", "add", ".")
    clone.run("dvc", "repro", "--quiet")
    return clone


def changed_stages(clone: Clone) -> set[str]:
    """Stages that `dvc status` calls out of date, without the cell's name."""
    return {name.partition("@")[0] for name in json.loads(clone.run("dvc", "status", "--json"))}


@pytest.mark.parametrize("number", (0, 1))
def test_the_experiment_ran_with_every_type_of_kv(clone: Clone, number: int) -> None:
    cells = json.loads((clone.root / "artifacts/bench/report.json").read_text())["contexts"]
    assert [cell["kv"] for cell in cells] == ["float32", "int8"]
    cell = cells[number]
    assert cell["identical_text"] is True
    assert cell["cold"]["prompt_tokens"] == 500 and cell["cold"]["cached_tokens"] == 0
    assert cell["control"]["cached_tokens"] == 0
    assert cell["restored"]["prompt_tokens"] == cell["control"]["prompt_tokens"]
    records = clone.root / "artifacts/bench/records"
    first, pages, second = (
        json.loads((records / name).with_suffix(".json").read_text())
        for name in (f"{PROMPT}/first", f"{CELLS[number]}/pages", f"{CELLS[number]}/second")
    )
    assert second["tokens"][:500] == first["tokens"]
    assert cell["restored"]["cached_tokens"] == len(second["tokens"]) - len(first["follow_up"])
    assert cell["restored"]["bytes_read"] > 0 and pages["paths"]
    for run in ("cold", "restored", "control"):
        parts = cell[run]["parts"]
        assert sum(parts.values()) == pytest.approx(cell[run]["ttft_ms"], abs=0.01)
        assert min(parts.values()) >= 0 and parts["matmul_ms"] > 0 and parts["attention_ms"] > 0


def test_int8_kv_takes_fewer_bytes_and_another_namespace(clone: Clone) -> None:
    float32, int8 = json.loads((clone.root / "artifacts/bench/report.json").read_text())["contexts"]
    assert int8["namespace"] != float32["namespace"]
    assert int8["restored"]["bytes_read"] < float32["restored"]["bytes_read"] / 2


def test_everything_there_is_to_look_at_is_written(clone: Clone) -> None:
    for name in RESULTS:
        assert (clone.root / "artifacts/bench" / name).stat().st_size > 0
    shown = json.loads(clone.run("dvc", "metrics", "show", "--json"))
    numbers = {Path(path).stem: file["data"] for path, file in shown[""]["data"].items()}
    assert set(numbers) == set(CELLS)
    assert {"speedup_ttft", "restored_ttft_wait_ms", "restored_bytes_written"} <= set(numbers[CELLS[0]])


def prepared(clone: Clone) -> dict[str, list[Path]]:
    """The artifacts of each prefix, as the stage lists them."""
    record = json.loads((clone.root / "artifacts/prefixes/tiny-tiny.json").read_text())
    store = clone.root / "artifacts/kv" / record["namespace"][:16]
    assert record["identity"]["model"]["num_layers"] == 2 and record["model"] == "tiny"
    return {
        prefix["name"]: [store / key[:2] / f"{key}.safetensors" for key in prefix["keys"]]
        for prefix in record["prefixes"]
    }


def test_the_user_s_store_holds_the_prefixes_and_nothing_else(clone: Clone) -> None:
    pages = [page for pages in prepared(clone).values() for page in pages]
    assert set(pages) == set((clone.root / "artifacts/kv").glob("*/*/*.safetensors"))


def test_only_what_is_missing_of_the_prefixes_is_computed(clone: Clone) -> None:
    before = prepared(clone)
    kept = {page: page.stat().st_mtime_ns for page in before["house"]}
    for page in before["cats"]:
        page.unlink()
    said = clone.run("dvc", "repro", "--force", "--single-item", "prefixes@tiny-tiny")
    assert re.search(r"house: (\d+) tokens, 0 of them computed now", said)
    assert re.search(r"cats: (\d+) tokens, \1 of them computed now", said)
    assert prepared(clone) == before and all(page.is_file() for pages in before.values() for page in pages)
    assert kept == {page: page.stat().st_mtime_ns for page in before["house"]}


def test_nothing_is_done_twice_and_git_sees_only_results(clone: Clone) -> None:
    assert changed_stages(clone) == set()
    new = clone.run("git", "status", "--porcelain", "--untracked-files=all").splitlines()
    untracked = {line[3:] for line in new if line.startswith("??")}
    assert untracked == {"dvc.lock", *(f"artifacts/bench/{name}" for name in RESULTS)}


@pytest.mark.parametrize(
    ("name", "old", "new", "stages"),
    (
        ("conf/cache/default.yaml", "page_tokens: 256", "page_tokens: 128", {"snapshot", "restore", "prefixes"}),
        ("conf/prefixes/tiny.yaml", "Every person", "Each person", {"prefixes"}),
        ("conf/prefixes/assistant.yaml", "briefly", "shortly", set()),
        ("artifacts/prompts/kestrel.md", "one page", "a page", {"prefixes"}),
        ("conf/cache/board.yaml", "page_tokens: 256", "page_tokens: 128", set()),
        ("conf/cache/off.yaml", "page_tokens: 256", "page_tokens: 128", {"control"}),
        ("conf/engine/int8.yaml", "threads: null", "threads: 1", {"snapshot", "restore", "control"}),
        (
            "conf/bench/default.yaml",
            "answer_tokens: 48",
            "answer_tokens: 9",
            {"prompts", "snapshot", "restore", "control"},
        ),
        ("conf/bench/default.yaml", "context_tokens: 2044", "context_tokens: 100", set()),
        (
            "conf/model/tiny.yaml",
            "random_seed: 7",
            "random_seed: 8",
            {"model", "prompts", "snapshot", "restore", "control", "prefixes"},
        ),
        ("conf/server/default.yaml", "max_queue: 32", "max_queue: 3", set()),
        ("params.yaml", "overrides: bench.answer_tokens=8", "overrides: bench.answer_tokens=9", {
            "model", "prompts", "snapshot", "restore", "control", "prefixes",
        }),
        ("params.yaml", "kv: [float32, int8]", "kv: [int8]", {"report"}),
        ("kestrel/bench/chart.py", '"restored"', "'restored'", {"report"}),
    ),
)  # fmt: skip
def test_an_edit_touches_just_its_dependants(
    clone: Clone, name: str, old: str, new: str, stages: set[str]
) -> None:
    path = clone.root / name
    before = path.read_text()
    path.write_text(before.replace(old, new))
    assert path.read_text() != before
    try:
        assert changed_stages(clone) == stages
        planned = re.findall(r"Running stage '(\w+)", clone.run("dvc", "repro", "--dry"))
        per_type = {stage: 2 if stage in ("snapshot", "restore", "control") else 1 for stage in stages}
        assert Counter(planned) == per_type
    finally:
        path.write_text(before)


def test_a_clone_that_has_the_records_but_not_the_kv_restores_too(clone: Clone) -> None:
    shutil.rmtree(clone.root / "artifacts/bench/stores")
    said = clone.run("dvc", "repro", "--force", "--single-item", f"restore@{CELLS[0]}")
    assert "computing them again" in said
    restored = json.loads((clone.root / f"artifacts/bench/records/{CELLS[0]}/restored.json").read_text())
    assert restored["run"]["cached_tokens"] > 500


def test_a_broken_promise_fails_the_report_after_it_is_written(clone: Clone) -> None:
    path = clone.root / f"artifacts/bench/records/{CELLS[0]}/control.json"
    before = path.read_text()
    record = json.loads(before)
    record["run"]["text"] += "!"
    Path(path).unlink()  # the file may be a link into DVC's cache
    path.write_text(json.dumps(record))
    try:
        done = clone.attempt("python", "-m", "pipelines.report")
        assert done.returncode == 1 and "differs from the control's" in done.stderr
        cell, other = json.loads((clone.root / "artifacts/bench/report.json").read_text())["contexts"]
        assert cell["identical_text"] is False and other["identical_text"] is True
    finally:
        path.write_text(before)
