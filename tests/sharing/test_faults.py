"""Promise: a remote that is down, slow or lying delays an answer by a bound at most, and leaves nothing corrupt."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.sharing import ondemand
from kestrel.sharing.repository import file_md5
from tests.sharing.conftest import HOLD_LOCK, TEXTS, Board, answer, pulled_pages

PROMPT = f"{TEXTS['manual']} Q"


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    held.append(listener.accept()[0])
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def remote_folder(clone: Board) -> Path:
    return clone.root.parent / "remote"


def prefill(runtime: object, text: str) -> object:
    sequence = runtime.cache.open(runtime.tokenizer.encode(text))  # type: ignore[attr-defined]
    try:
        sequence.prefill()
    finally:
        sequence.close()
    return sequence.stats


def test_a_remote_that_is_gone_is_said_so_and_left_alone_for_a_while(clone: Board) -> None:
    shutil.rmtree(remote_folder(clone))
    with clone.runtime() as runtime:
        first = prefill(runtime, PROMPT)
        assert first.computed_tokens == first.prompt_tokens  # type: ignore[attr-defined]
        assert "not pulled: cannot read from remote storage" in first.pull_problem  # type: ignore[attr-defined]
        assert any("[KV-DISK] not pulled" in line for line in clone.lines)
        second = prefill(runtime, f"{TEXTS['tools']} x")
        assert "tried again after" in second.pull_problem and second.pull_ms < 100  # type: ignore[attr-defined]
    assert not list((clone.root / ".dvc" / "cache").glob("kestrel/*"))


def test_it_is_tried_again(clone: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ondemand, "RETRY_SECONDS", 0.0)
    away = remote_folder(clone).rename(clone.root.parent / "away")
    with clone.runtime(
        "cache.max_prefix_tokens=16"
    ) as runtime:  # saves nothing, so the next prompt misses too
        assert prefill(runtime, PROMPT).pull_problem  # type: ignore[attr-defined]
        away.rename(remote_folder(clone))
        assert prefill(runtime, f"{TEXTS['tools']} x").pulled_tokens > 200  # type: ignore[attr-defined]


def test_a_repaired_configuration_is_noticed(clone: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ondemand, "RETRY_SECONDS", 0.0)
    url = str(remote_folder(clone))
    clone.run("dvc", "remote", "remove", "storage")
    with clone.runtime("cache.max_prefix_tokens=16") as runtime:
        assert prefill(runtime, PROMPT).pull_problem  # type: ignore[attr-defined]
        clone.run("dvc", "remote", "add", "--default", "storage", url)
        assert prefill(runtime, f"{TEXTS['tools']} x").pulled_tokens > 200  # type: ignore[attr-defined]


def test_what_dvc_s_cache_has_comes_back_while_another_command_holds_dvc_s_lock(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    for page in clone.published():
        page.path.unlink()
    holder = clone.start("python", "-c", HOLD_LOCK)  # as `dvc push` does for as long as it sends
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        with clone.runtime() as runtime:
            stats = prefill(runtime, PROMPT)
            assert stats.pulled_tokens > 300 and stats.pull_ms < 5000  # type: ignore[attr-defined]
    finally:
        holder.kill()
        holder.communicate()


def test_a_damaged_object_is_not_sent(clone: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    clone.run("kestrel", "kv", "pull")
    page = clone.published()[0]
    cached = clone.root / ".dvc" / "cache" / "files" / "md5" / page.md5[:2] / page.md5[2:]
    whole = page.path.read_bytes()
    page.path.unlink()
    page.path.write_bytes(whole)  # computed and saved anew
    cached.chmod(0o644)
    cached.write_bytes(whole[:-4] + b"\xff\x00\xff\x00")
    for sent in remote_folder(clone).rglob(page.md5[2:]):
        sent.unlink()
    clone.run("kestrel", "kv", "push")
    assert [file_md5(sent) for sent in remote_folder(clone).rglob(page.md5[2:])] == [page.md5]
    assert file_md5(cached) == page.md5


def test_a_silent_remote_costs_no_more_than_the_bound(clone: Board, silent_url: str) -> None:
    clone.run("dvc", "remote", "modify", "storage", "url", silent_url)
    with clone.runtime("cache.pull_seconds=1.0") as runtime:
        started = time.monotonic()
        stats = prefill(runtime, PROMPT)
        assert 1.0 <= stats.pull_ms / 1e3 < 2.0  # type: ignore[attr-defined]
        assert "within 1 s (cache.pull_seconds)" in stats.pull_problem  # type: ignore[attr-defined]
        assert stats.computed_tokens == stats.prompt_tokens  # type: ignore[attr-defined]
        again = prefill(runtime, f"{TEXTS['manual']} But")  # in memory by now, so nothing is wanted
        assert again.pull_problem is None  # type: ignore[attr-defined]
        assert time.monotonic() - started < 20


def test_corrupt_bytes_are_refused_and_not_kept(clone: Board) -> None:
    for path in remote_folder(clone).glob("files/md5/*/*"):
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.seek(30_000)
            file.write(b"\xff\x00\xff\x00")
    text, said = answer(clone, PROMPT)
    assert "sent a damaged" in said and "not pulled" in said and pulled_pages(said) == 0
    assert not list((clone.root / ".dvc" / "cache").glob("files/md5/*/*"))
    expected, _ = answer(clone, PROMPT, "cache=off")
    assert text == expected
    clone.check_store()


def test_an_empty_object_that_a_killed_dvc_left_is_replaced(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    page = next(page for page in clone.published() if page.prefix == "manual")
    for folder in (remote_folder(clone), clone.root / ".dvc" / "cache"):
        path = folder / "files" / "md5" / page.md5[:2] / page.md5[2:]
        path.unlink()
        path.touch()
    assert "1 page published" in clone.run("kestrel", "kv", "publish", "manual")
    clone.check_marks()
    assert "1 page pushed" in clone.run("kestrel", "kv", "push")
    assert file_md5(remote_folder(clone) / "files" / "md5" / page.md5[:2] / page.md5[2:]) == page.md5


def test_a_damaged_object_in_the_cache_is_fetched_again(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    page = next(page for page in clone.published() if page.first == 128 and page.prefix is None)
    cached = clone.root / ".dvc" / "cache" / "files" / "md5" / page.md5[:2] / page.md5[2:]
    page.path.unlink()
    cached.chmod(0o644)
    with open(cached, "r+b") as file:
        file.seek(30_000)
        file.write(b"\xff\x00\xff\x00")
    cached.chmod(0o444)
    _, said = answer(clone, PROMPT)
    assert pulled_pages(said) == 1
    assert clone.check_store() >= 4
    assert clone.run("dvc", "status", "--quiet") == ""


def test_a_page_of_the_store_that_rots_is_pulled_again(clone: Board) -> None:
    clone.run("kestrel", "kv", "pull")
    page = next(page for page in clone.published() if page.first == 128 and page.prefix is None)
    page.path.chmod(0o644)
    with open(page.path, "r+b") as file:  # the same inode as the cache's object
        file.seek(30_000)
        file.write(b"\xff\x00\xff\x00")
    text, said = answer(clone, PROMPT)
    expected, _ = answer(clone, PROMPT, "cache=off")
    assert text == expected and "damaged" in said
    assert len(list(clone.kv.glob("quarantine/*"))) == 1
    clone.check_store()


def test_pulling_can_be_switched_off(clone: Board) -> None:
    with clone.runtime("cache.pull_seconds=null") as runtime:
        stats = prefill(runtime, PROMPT)
        assert stats.pulled_tokens == 0 and stats.computed_tokens == stats.prompt_tokens  # type: ignore[attr-defined]
    assert not any("published" in line for line in clone.lines)
