"""Promise: publishing, listing and withdrawing need no data to be understood, and doing it twice changes nothing."""

import json
import os
import time
from pathlib import Path

import pytest

from kestrel.errors import ArtifactError, SharingError
from kestrel.sharing.exchange import withdraw
from kestrel.sharing.listing import Listing
from kestrel.sharing.mark import encode_mark, read_mark
from tests.sharing.conftest import PAGE, TEXTS, Board


def state(board: Board) -> dict[str, tuple[int, bytes]]:
    """Every mark with its time of modification."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in board.kv.glob("*/*/*.safetensors.dvc")
    }


def test_publishing_is_idempotent_and_dvc_understands_it(source: Board) -> None:
    before = state(source)
    said = source.run("kestrel", "kv", "publish", "manual")
    assert "0 pages published (0 B), 4 published already" in said
    assert state(source) == before and len(before) == 6
    assert "6 there already" in source.run("kestrel", "kv", "push")
    assert json.loads(source.run("dvc", "status", "--json")) == {}
    assert json.loads(source.run("dvc", "status", "--cloud", "--json")) == {}
    assert source.run("git", "status", "--porcelain") == ""


def test_the_store_s_file_and_dvc_s_object_share_their_bytes(source: Board) -> None:
    for page in source.published():
        assert page.path.stat().st_nlink == 2


def test_a_clone_without_data_lists_and_resolves(clone: Board) -> None:
    assert not clone.artifacts()
    listed = json.loads(clone.run("kestrel", "kv", "ls", "--published", "--json"))["pages"]
    assert [page["first"] for page in listed] == [0, 0, PAGE, PAGE, 2 * PAGE, 3 * PAGE]
    assert {page["prefix"] for page in listed} == {None, "tools", "manual"} and listed[-1][
        "prefix"
    ] == "manual"
    assert not any(page["here"] for page in listed)
    table = clone.run("kestrel", "kv", "ls", "--published")
    assert "manual" in table and "0 of 4" in table and "llama, 2 layers x 64" in table
    assert "4 pages pulled" in clone.run("kestrel", "kv", "pull", "manual")
    assert clone.check_store() == 4
    assert "2 pages pulled" in clone.run("kestrel", "kv", "pull")
    assert json.loads(clone.run("dvc", "status", "--json")) == {}


def test_marks_are_seen_where_file_times_are_whole_seconds(clone: Board) -> None:
    page = clone.published()[0]
    mark, second = page.mark_path.read_bytes(), int(time.time())
    page.mark_path.unlink()
    os.utime(page.mark_path.parent, (second, second))
    listing = Listing(clone.kv).refresh()
    assert page.key not in {other.key for other in listing.pages}
    page.mark_path.write_bytes(mark)  # within the same second
    os.utime(page.mark_path.parent, (second, second))
    assert page.key in {other.key for other in listing.refresh().pages}


def test_what_kestrel_publishes_dvc_pulls(clone: Board) -> None:
    clone.run("dvc", "pull", "--quiet")
    assert clone.check_store() == 6


def test_a_prefix_that_ends_inside_a_longer_page_gets_a_last_page_of_its_own(board: Board) -> None:
    long = f"{TEXTS['manual']} And more of the same, to cover the end of it."
    with board.runtime() as runtime:
        tokens = runtime.tokenizer.encode(long)
        runtime.prefill(tokens)
    board.run("kestrel", "kv", "publish", "manual")
    (end,) = [page for page in board.published() if page.prefix == "manual"]
    assert end.num_prefix_tokens < len(tokens) and board.check_store() == 5
    with board.runtime() as runtime:  # and the marks of the two do not disturb each other
        assert runtime.find(tokens).num_tokens == len(tokens) - 1


def test_withdrawing_leaves_what_others_need(board: Board) -> None:
    with board.runtime() as runtime:
        store = runtime.store
        assert store is not None
        for text in (TEXTS["manual"], TEXTS["manual"][:300] + "? ", TEXTS["manual"][:300] + "!" * 150):
            runtime.prefill(runtime.tokenizer.encode(text))
        assert runtime.writer is not None
        runtime.writer.drain()
        ends = [row.key.hex() for row in store.list_pages() if not row.num_children]
    assert len(ends) == 3
    board.run("kestrel", "kv", "publish", *ends)
    listing = Listing(board.kv).refresh()
    shared = [page for page in listing.pages if sum(child.parent == page.key for child in listing.pages) > 1]
    assert shared
    with pytest.raises(SharingError, match="continued by 3 published pages"):
        withdraw(listing, [shared[-1]])
    board.run("kestrel", "kv", "rm", ends[0])
    left = {page.key for page in board.published()}
    assert shared[-1].key in left and bytes.fromhex(ends[0]) not in left
    assert board.check_store() == len(listing.pages)  # the data stayed
    board.run("kestrel", "kv", "rm", *ends[1:])
    assert not board.published()


def test_a_mark_survives_being_rewritten_by_dvc_and_refuses_what_does_not_fit(
    source: Board, tmp_path: Path
) -> None:
    (page,) = [page for page in source.published() if page.prefix == "manual"]
    folder = tmp_path / page.namespace.hex()[:16] / page.key.hex()[:2]
    folder.mkdir(parents=True)
    path = folder / page.mark_path.name
    from dvc.utils.serialize import dump_yaml, parse_yaml

    dump_yaml(path, parse_yaml(encode_mark(page).decode(), str(path)))
    assert encode_mark(read_mark(path)) == encode_mark(page)
    for old, new in (
        (page.md5, page.md5[:-1] + "g"),
        (page.namespace.hex(), page.parent.hex()),
        ('"num_layers":2', '"num_layers":3'),
        (f"size: {page.nbytes}", "size: -1"),
        (f'"first":{page.first}', '"first":0'),
        ("outs:", "<<<<<<< ours\nouts:\n- md5: 'x'"),
        ('"format":1,"identity"', '"format":2,"identity"'),
        ("kestrel: '", "kestrel: '["),
    ):
        text = encode_mark(page).decode()
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ArtifactError):
            read_mark(path)
    path.unlink()
    os.symlink(page.mark_path, path)
    with pytest.raises(ArtifactError):
        read_mark(path)


def test_outside_a_repository_it_says_what_to_do(tmp_path: Path, models: Path) -> None:
    (tmp_path / "alone").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "alone" / f"{name}.txt").write_text(text)
    code, _, stderr = Board(tmp_path / "alone", models).attempt("kestrel", "kv", "publish", "manual")
    assert code == 1 and "is not inside a DVC repository; run `git init && dvc init`" in stderr
