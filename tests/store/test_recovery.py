"""Promise: a fault of disk, root or catalog is a StoreError while it lasts and forgotten when it is over."""

import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel.errors import ArtifactError, StoreError
from kestrel.identity import as_tokens, page_key, prefix_sha256
from kestrel.store.artifact import PageHeader, encode_header
from kestrel.store.files import FileTree
from kestrel.store.store import Limits, Store
from tests.store.pages import IDENTITY, LAYOUT, NAMESPACE, all_files, open_store, payload_of, publish, restore

TOKENS = as_tokens(range(40))
REPOSITORY = Path(__file__).parents[2]


def delete_root(root: Path) -> None:
    shutil.rmtree(root)


def replace_root(root: Path) -> None:
    """By an empty one with the same name: as a clean-up script would."""
    shutil.rmtree(root)
    root.mkdir()


def delete_namespace(root: Path) -> None:
    shutil.rmtree(root / NAMESPACE.name)


def delete_files(root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize("fault", [delete_root, replace_root, delete_namespace, delete_files])
def test_store_deleted_while_in_use(store: Store, root: Path, fault: Callable[[Path], None]) -> None:
    publish(store, TOKENS)
    fault(root)
    assert restore(store, TOKENS) == 0
    publish(store, TOKENS)
    fault(root)
    store.touch([b"0" * 16])
    assert store.usage().files == 0
    assert restore(store, TOKENS) == 0
    publish(store, TOKENS)
    assert restore(store, TOKENS) == 40
    assert store.verify().damaged == ()


def test_first_call_after_deletion_may_be_any(root: Path) -> None:
    calls: list[Callable[[Store], object]] = [
        lambda store: store.find_prefix(NAMESPACE, TOKENS, 16, 16),
        lambda store: publish(store, TOKENS),
        lambda store: store.touch([b"0" * 16]),
        lambda store: store.pin([b"0" * 16]),
        lambda store: store.sweep(),
        lambda store: store.usage(),
        lambda store: store.list_pages(),
        lambda store: store.verify(),
        lambda store: store.remove_covered(NAMESPACE, NAMESPACE.digest, TOKENS),
        lambda store: store.quarantine(store.page_path(NAMESPACE.digest, b"0" * 16), "a test"),
    ]
    with open_store(root) as store:
        for call in calls:
            publish(store, TOKENS)
            shutil.rmtree(root)
            call(store)
            assert store.usage().files in (0, 3)


def test_root_that_cannot_be(root: Path) -> None:
    root.write_text("a file")
    store = Store(root, Limits())
    with pytest.raises(StoreError, match="cannot open the store"):
        store.open()
    root.unlink()
    with store.open():
        publish(store, TOKENS)
        shutil.rmtree(root)
        root.write_text("a file")
        for _ in range(2):
            with pytest.raises(StoreError):
                store.find_prefix(NAMESPACE, TOKENS, 16, 16)
            with pytest.raises(StoreError):
                publish(store, TOKENS)
            with pytest.raises(StoreError):
                store.usage()
        root.unlink()
        publish(store, TOKENS)
        assert restore(store, TOKENS) == 40


def test_root_may_be_a_link_and_its_parents_missing(root: Path) -> None:
    target = root.parent / "disk" / "here"
    target.mkdir(parents=True)
    root.symlink_to(target)
    with open_store(root / "a" / "b") as store:
        publish(store, TOKENS)
        assert restore(store, TOKENS) == 40
    with open_store(root) as store:
        publish(store, TOKENS)
        assert (target / NAMESPACE.name).is_dir()


def test_folders_below_are_not_followed_if_they_are_links(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    root.mkdir()
    (root / NAMESPACE.name).symlink_to(elsewhere)
    with open_store(root) as store:
        with pytest.raises(StoreError, match="[Nn]ot a directory"):
            publish(store, TOKENS)
        assert list(elsewhere.iterdir()) == []
        (root / NAMESPACE.name).unlink()
        publish(store, TOKENS)


def put_garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(50_000))


def put_garbage_behind_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + random.Random(0).randbytes(len(content) - 100))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def put_other_database(path: Path) -> None:
    import sqlite3

    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE pages (id INTEGER PRIMARY KEY)")


def put_other_version(path: Path) -> None:
    import sqlite3

    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")


def drop_table(path: Path) -> None:
    import sqlite3

    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE uses")


def put_wrong_types(path: Path) -> None:
    import sqlite3

    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE pages SET tokens = 'text', nbytes = 'text'")


def put_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def put_log_of_another(path: Path) -> None:
    path.unlink()
    path.with_name("catalog.sqlite3-wal").write_bytes(random.Random(0).randbytes(50_000))


def put_link_as_log(path: Path) -> None:
    target = path.parent.parent / "precious"
    target.write_text("precious")
    path.with_name("catalog.sqlite3-wal").symlink_to(target)


FAULTS = [
    Path.unlink,
    put_garbage,
    put_garbage_behind_header,
    cut,
    empty,
    put_other_database,
    put_other_version,
    drop_table,
    put_wrong_types,
    put_link,
    put_log_of_another,
    put_link_as_log,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_catalog_is_made_anew_at_start(
    store: Store, root: Path, fault: Callable[[Path], None]
) -> None:
    keys = publish(store, TOKENS)
    store.close()
    fault(root / "catalog.sqlite3")
    with open_store(root) as again:
        assert {row.key for row in again.list_pages()} == {*keys}
        assert restore(again, TOKENS) == 40
        assert again.usage().quarantined == 0
        again.pin(keys)
        publish(again, as_tokens(range(7, 70)))
        assert again.verify().damaged == ()
    if fault is put_link_as_log:
        assert (root.parent / "precious").read_text() == "precious"


@pytest.mark.parametrize("fault", [Path.unlink, put_garbage, cut, drop_table, put_wrong_types])
def test_damaged_catalog_is_made_anew_while_in_use(
    store: Store, root: Path, fault: Callable[[Path], None]
) -> None:
    publish(store, TOKENS)
    store._current_catalog().truncate_log()
    fault(root / "catalog.sqlite3")
    # What is in SQLite's own memory may answer for a while; wrong answers are refused when a page is opened.
    for _ in range(3):
        try:
            restore(store, TOKENS)
            publish(store, TOKENS)
        except StoreError:
            continue
    publish(store, TOKENS)
    assert restore(store, TOKENS) == 40


def test_flipped_bits_in_the_catalog_never_hurt(store: Store, root: Path) -> None:
    """Nothing but a hit, a miss or a StoreError may come of it, and the artifacts survive."""
    publish(store, TOKENS)
    publish(store, as_tokens([*range(20), *range(100, 150)]))
    files = {path for path in root.rglob("*.safetensors")}
    store.close()
    content = (root / "catalog.sqlite3").read_bytes()
    rng = random.Random(2)
    for _ in range(120):
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 30])):
            flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        for path in root.glob("catalog.sqlite3*"):
            path.unlink()
        (root / "catalog.sqlite3").write_bytes(flipped)
        with Store(root, Limits()) as again:
            match = again.find_prefix(NAMESPACE, TOKENS, 16, 1)
            for ref in match.pages:
                try:
                    again.open_page(ref, LAYOUT).close()
                except ArtifactError:
                    break
            try:
                again.touch([ref.key for ref in match.pages])
                again.list_pages()
                again.sweep()
                again.usage()
            except StoreError:
                continue
    assert {path for path in root.rglob("*.safetensors")} == files


def test_catalog_of_many_files_is_made_from_headers(store: Store, root: Path) -> None:
    keys = [publish(store, as_tokens(range(1000 * n, 1000 * n + 100))) for n in range(10)]
    before = {
        row.key: (row.parent, row.first, row.num_tokens, row.nbytes, row.num_children)
        for row in store.list_pages()
    }
    for number, path in enumerate(store.page_path(NAMESPACE.digest, key) for key in sum(keys, [])):
        os.utime(path, (10**9 - number, 10**9 - number))
    store.close()
    (root / "catalog.sqlite3").unlink()
    with open_store(root) as again:
        rows = again.list_pages()
        assert {
            row.key: (row.parent, row.first, row.num_tokens, row.nbytes, row.num_children) for row in rows
        } == before
        assert [row.key for row in rows] == sum(keys, [])  # last use is taken from the time of writing
        assert again.stats()["adopted_pages"] == len(before)


def test_files_that_come_and_go_are_noticed(store: Store, root: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "other") as other:
        keys = publish(other, TOKENS)
        paths = [other.page_path(NAMESPACE.digest, key) for key in keys]
        for path in paths:
            target = root / path.relative_to(other.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    first = root / paths[0].relative_to(tmp_path / "other")
    row = store.adopt(first)
    assert row.key == keys[0] and restore(store, TOKENS) == 16
    assert store.adopt(first) == row
    assert store.usage().files == 3 and restore(store, TOKENS) == 40
    first.unlink()
    assert store.usage().files == 2 and restore(store, TOKENS) == 0
    first.write_bytes(b"damaged")
    with pytest.raises(ArtifactError):
        store.adopt(first)
    for bad in (root / "x.safetensors", first.with_name("x"), Path("/etc/passwd"), root / ".." / "x"):
        with pytest.raises(ValueError, match="is not <root>"):
            store.adopt(bad)
        with pytest.raises(ValueError, match="is not <root>"):
            store.quarantine(bad, "a test")


def test_too_many_open_files(store: Store) -> None:
    publish(store, TOKENS)
    (ref, *_) = store.find_prefix(NAMESPACE, TOKENS, 16, 16).pages
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(StoreError):  # not the file's fault: it must not be quarantined for it
            store.open_page(ref, LAYOUT)
        with pytest.raises(StoreError):
            publish(store, as_tokens([1, 2, 3]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert restore(store, TOKENS) == 40
    publish(store, as_tokens([1, 2, 3]))
    assert store.usage().quarantined == 0


def test_write_that_fails_half_way_leaves_nothing(store: Store, root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = as_tokens(range(6000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match="File too large"):
                publish(store, big, 6000)
        publish(store, TOKENS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in all_files(root) if path.suffix == ".tmp"] == []
    assert store.usage().files == 3
    publish(store, big, 6000)
    assert restore(store, big) == 6000


def test_read_only_and_full_disk() -> None:
    """On a file system of its own, in a namespace of its own: really full, really read-only, then well again."""
    script = textwrap.dedent(
        """
        import subprocess, sys, tempfile
        from pathlib import Path
        from kestrel.errors import StoreError
        from kestrel.identity import as_tokens
        from tests.store.pages import NAMESPACE, all_files, open_store, publish, restore

        disk = Path(tempfile.mkdtemp())
        def mount(*options): subprocess.run(["mount", *options], check=True)
        def refused(call):
            for _ in range(3):
                try:
                    call()
                except StoreError:
                    continue
                raise SystemExit(f"no StoreError from {call}")

        mount("-t", "tmpfs", "-o", "size=3m", "none", disk)
        root = disk / "kv"
        small, big = as_tokens(range(40)), as_tokens(range(1000, 9000))
        with open_store(root) as store:
            publish(store, small)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
            refused(lambda: publish(store, big, 8000))
            refused(lambda: publish(store, as_tokens([5] * 100), 100))
            assert restore(store, small) == 40
            assert not [path for path in all_files(root) if path.suffix == ".tmp"]
            filler.unlink()
            publish(store, big, 8000)
            assert restore(store, big) == 8000

            mount("--bind", root, root)
            mount("-o", "remount,bind,ro", root)
            refused(lambda: publish(store, as_tokens([5] * 100), 100))
            assert restore(store, small) == 40
            subprocess.run(["umount", root], check=True)
            publish(store, as_tokens([5] * 100), 100)
            assert store.verify().damaged == () and store.usage().quarantined == 0
        mount("-o", "remount,ro", disk)
        refused(lambda: open_store(root))
        mount("-o", "remount,rw", disk)
        with open_store(root) as store:
            assert restore(store, big) == 8000
        """
    )
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    result = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_identity_file_is_put_right(store: Store, root: Path) -> None:
    publish(store, TOKENS)
    path = root / NAMESPACE.name / "identity.json"
    assert store.load_identity(NAMESPACE.digest) == IDENTITY
    for content in (b"{}", b"", b"\xff", b"[1]"):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="is not the identity"):
            store.load_identity(NAMESPACE.digest)
        publish(store, as_tokens([len(content), 1]))
        assert store.load_identity(NAMESPACE.digest) == IDENTITY
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="not a regular file"):
        store.load_identity(NAMESPACE.digest)
    publish(store, as_tokens([77, 1]))
    assert store.load_identity(NAMESPACE.digest) == IDENTITY


def test_contradicting_arguments_are_a_mistake_of_the_caller(store: Store) -> None:
    tokens = as_tokens([1, 2])
    key = page_key(NAMESPACE.digest, tokens)
    good = {
        "namespace": NAMESPACE,
        "identity": IDENTITY,
        "layout": LAYOUT,
        "key": key,
        "parent": NAMESPACE.digest,
        "first": 0,
        "tokens": tokens,
        "prefix_sha256": prefix_sha256(tokens),
        "payload": payload_of(key, 2),
    }
    wrong: list[dict[str, object]] = [
        {"identity": {"other": 1}},
        {"key": b"0" * 16},
        {"parent": b"0" * 16},
        {"first": 16},
        {"first": -1},
        {"tokens": tokens[:0]},
        {"tokens": tokens[::-1]},
        {"prefix_sha256": "0" * 64},
        {"prefix_sha256": "no digest"},
        {"payload": payload_of(key, 2)[:1]},
        {"payload": payload_of(key, 3)},
        {"payload": [memoryview(layer * 2)[::2] for layer in payload_of(key, 2)]},
    ]
    for change in wrong:
        with pytest.raises(ValueError):
            store.publish(**{**good, **change})  # type: ignore[arg-type]
    assert store.usage().files == 0
    store.publish(**good)  # type: ignore[arg-type]


def test_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.find_prefix(NAMESPACE, TOKENS, 16, 16)


def test_never_replaces_even_without_hard_links(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT answers EPERM to link()."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    tree = FileTree(root)
    tree.create_root()
    assert tree.publish_file(("a", "b"), [b"first", b" content"])
    assert not tree.publish_file(("a", "b"), [b"second"])
    assert (root / "a" / "b").read_bytes() == b"first content"
    with open_store(root) as store:
        publish(store, TOKENS)
        assert restore(store, TOKENS) == 40
    assert [path for path in all_files(root) if path.suffix == ".tmp"] == []


def test_a_different_file_under_the_same_key_is_kept(store: Store, root: Path) -> None:
    """The first writer wins: a sound artifact is never replaced, also not by one with other bits."""
    tokens = as_tokens([1, 2, 3])
    (key,) = publish(store, tokens)
    path = store.page_path(NAMESPACE.digest, key)
    header = PageHeader(
        NAMESPACE.digest.hex(),
        key.hex(),
        NAMESPACE.digest.hex(),
        0,
        3,
        prefix_sha256(tokens),
        ("0" * 32,) * 2,
    )
    before = encode_header(LAYOUT, header) + b"".join(payload_of(b"x", 3)) + tokens.tobytes()
    path.write_bytes(before)
    publish(store, tokens)
    assert path.read_bytes() == before
    assert restore(store, tokens) == 0  # its digests are wrong, so it goes as soon as it is read
    publish(store, tokens)
    assert restore(store, tokens) == 3


def test_a_store_that_could_not_be_opened_is_used_once_it_can(root: Path) -> None:
    root.parent.mkdir(exist_ok=True)
    root.write_text("in the way")
    store = Store(root, Limits())
    with pytest.raises(StoreError):
        store.open()
    with pytest.raises(StoreError):
        publish(store, TOKENS)
    root.unlink()
    publish(store, TOKENS)
    assert restore(store, TOKENS) == len(TOKENS)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.usage()


def test_a_schema_that_is_no_text_is_damage_of_the_catalog(store: Store, root: Path) -> None:
    """SQLite quotes it in its message, which Python cannot decode."""
    publish(store, TOKENS)
    store.close()
    catalog = root / "catalog.sqlite3"
    content = catalog.read_bytes()
    assert b"CREATE TABLE pages" in content
    catalog.write_bytes(content.replace(b"CREATE TABLE pages (", b"CREATE TABLE pages \xc5\xc5"[:20]))
    with Store(root, Limits()) as again:
        assert restore(again, TOKENS) == len(TOKENS)


def test_a_folder_in_the_place_of_the_catalog_is_put_aside(store: Store, root: Path) -> None:
    publish(store, TOKENS)
    catalog = root / "catalog.sqlite3"
    catalog.unlink()
    catalog.mkdir()
    (catalog / "precious").write_text("not the store's")
    assert restore(store, TOKENS) == len(TOKENS)
    assert [path.read_text() for path in root.rglob("precious")] == ["not the store's"]
