"""Promise: what one board publishes another serves, over any kind of remote, pulling just what a prompt needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from kestrel.sharing.repository import file_md5
from tests.cache.conftest import logits_bits
from tests.sharing.conftest import ROOT, TEXTS, Board, answer, pulled_pages


def test_a_prompt_pulls_just_its_pages_once(source: Board, other: Board) -> None:
    prompt = f"{TEXTS['tools']} What"
    expected, _ = answer(other, prompt, "cache=off")
    found, said = answer(other, prompt)
    assert found == expected
    assert "6 page(s), 6 of them not here yet" in said and pulled_pages(said) == 2
    assert {page.prefix for page in other.published() if page.is_here} == {None, "tools"}
    found, said = answer(other, prompt)
    assert found == expected and pulled_pages(said) == 0 and " restored" in said
    assert other.check_store() >= 2
    for page in other.published():
        if page.is_here:
            assert (
                file_md5(page.path) == page.md5 == file_md5(source.root / page.path.relative_to(other.root))
            )


def test_clones_publish_different_and_equal_prefixes_and_merge_them(source: Board, tmp_path: Path) -> None:
    remote = shutil.copytree(source.root.parent / "remote", tmp_path / "remote")
    boards = []
    for name, prefixes in (("b", ("notes", "rules")), ("c", ("rules", "manual"))):
        board = Board(tmp_path / name, source.models)
        source.run("git", "clone", "--quiet", str(source.root), str(board.root))
        board.run("git", "checkout", "--quiet", "-b", name)
        board.run("dvc", "remote", "modify", "storage", "url", str(remote))
        board.run("kestrel", "kv", "publish", *prefixes)
        board.run("kestrel", "kv", "push")
        board.commit(f"publish {prefixes}")
        boards.append(board)
    b, c = boards
    b.run("git", "pull", "--quiet", "--no-rebase", "--no-edit", str(c.root), "c")
    c.run("git", "pull", "--quiet", "--no-rebase", "--no-edit", str(b.root), "b")
    for board in boards:
        assert not board.run("git", "status", "--porcelain")
        assert {page.prefix for page in board.published()} == {None, *TEXTS}
        with board.runtime() as runtime:
            for text in TEXTS.values():
                tokens = runtime.tokenizer.encode(f"{text} And")
                sequence = runtime.cache.open(tokens)
                sequence.prefill()
                sequence.close()
                assert sequence.stats.pull_problem is None
                assert sequence.stats.matched_tokens >= len(runtime.tokenizer.encode(text)) - 1
        assert board.check_store() >= 8


def test_a_pulled_prefix_gives_the_bits_of_a_cold_run(clone: Board) -> None:
    with clone.runtime("cache=off") as runtime:
        tokens = runtime.tokenizer.encode(f"{TEXTS['manual']} And where")
        cold, _ = logits_bits(runtime, tokens)
    with clone.runtime() as runtime:
        warm, stats = logits_bits(runtime, tokens)
    assert warm == cold
    assert stats.pulled_tokens and stats.pulled_bytes and stats.pull_ms and stats.pull_problem is None  # type: ignore[attr-defined]
    assert stats.restored_tokens >= stats.pulled_tokens - 1  # type: ignore[attr-defined]


def test_an_identical_prompt_uses_the_last_published_page_too(clone: Board) -> None:
    with clone.runtime() as runtime:
        tokens = runtime.tokenizer.encode(TEXTS["manual"])
        sequence = runtime.cache.open(tokens)
        assert sequence.stats.matched_tokens == len(tokens) - 1
        sequence.close()


def test_dvc_is_not_imported_before_the_first_hit(clone: Board) -> None:
    script = f"""
import sys
from kestrel.config import load_config
from kestrel.runtime import Runtime
config = load_config({[word for word in clone.words if not word.startswith("prefixes.")]!r})
with Runtime.open(config) as runtime:
    for prompt, expected in (("Nothing of the kind is published, is it?", False), ({TEXTS["manual"]!r}, True)):
        sequence = runtime.cache.open(runtime.tokenizer.encode(prompt))
        sequence.close()
        assert ("dvc" in sys.modules) == expected, (prompt, sequence.stats)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=clone.root,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


COMPUTE = """
import json, sys
from kestrel.config import load_config
from kestrel.runtime import Runtime
words, chunk, strangers, text, other_text = json.loads(sys.argv[1])
with Runtime.open(load_config(words)) as runtime:
    sequence = runtime.cache.open(runtime.tokenizer.encode(text))
    company = [runtime.cache.open(runtime.tokenizer.encode(f"{n} {other_text}")) for n in range(strangers)]
    while sequence.num_pending:
        runtime.cache.step([(sequence, chunk), *((other, 5) for other in company if other.num_pending)])
    for other in (sequence, *company):
        other.close()
"""


def test_equal_numerics_write_equal_bytes(tmp_path: Path, models: Path, source: Board) -> None:
    """Other threads, other splits, other company, another process: DVC sees one object."""
    digests = []
    for threads, chunk, strangers in ((1, 500, 0), (2, 37, 3)):
        board = Board(tmp_path / str(threads), models)
        board.root.mkdir()
        words = [word for word in board.words if not word.startswith("prefixes.")] + [
            f"engine.threads={threads}"
        ]
        setting = json.dumps([words, chunk, strangers, TEXTS["manual"], TEXTS["rules"]])
        board.run(sys.executable, "-c", COMPUTE, setting)
        digests.append({path.name: file_md5(board.kv / path) for path in board.artifacts()})
    alone, in_company = digests
    assert len(alone) == 4 and len(in_company) > 4
    assert alone == {name: in_company[name] for name in alone}
    assert {page.md5 for page in source.published() if page.path.name in alone} == set(alone.values())
