"""Publishing, pushing, pulling and withdrawing pages. Each can be killed at any moment and run again.

The order makes it so: an object is in the cache before its mark names it, parents are published before their
children, an artifact gets its name in the store when it is whole and checked. Whoever sees a page sees all of it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel.errors import ArtifactError, SharingError
from kestrel.identity import canonical_json
from kestrel.sharing.listing import Listing
from kestrel.sharing.mark import PREFIX_NAME, PublishedPage, read_mark, write_mark
from kestrel.sharing.repository import Remote, Repository, file_md5, find_repository
from kestrel.store.store import PageRow, Store

JOBS = 4  # objects on their way at once

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Outcome:
    """What became of some pages. `moved` were written or transferred, `present` needed nothing."""

    moved: int = 0
    moved_bytes: int = 0
    present: int = 0
    problems: tuple[str, ...] = ()  # one line for each page that did not make it


def _ignore(done: int, total: int) -> None:
    pass


def publish(
    store: Store,
    repository: Repository,
    pages: Sequence[PageRow],
    name: str | None,
    progress: Progress = _ignore,
) -> Outcome:
    """Make stored pages part of the repository: an object in DVC's cache and a mark beside each artifact.

    `pages` is a chain from position 0; `name` is given to its last page. A page that is published already keeps its
    mark, so doing it again changes nothing. Raises SharingError, StoreError or ArtifactError.
    """
    if any("tenant" in store.load_identity(namespace) for namespace in {page.namespace for page in pages}):
        raise SharingError(
            "these pages belong to one tenant of a server; what a tenant keeps is not published"
        )
    if name is not None and not PREFIX_NAME.fullmatch(name):
        raise SharingError(f"a published prefix has a name like {PREFIX_NAME.pattern}, found {name!r}")
    total = sum(page.nbytes for page in pages)
    done = moved = moved_bytes = present = 0
    problems: list[str] = []
    with store.protect([page.key for page in pages]):
        for page in pages:
            path = store.page_path(page.namespace, page.key)
            wanted_name = name if page is pages[-1] else None
            mark = _find_mark(path)
            wanted = (
                None
                if mark is None or wanted_name in (None, mark.prefix)
                else replace(mark, prefix=wanted_name)
            )
            if mark is not None and wanted is None and repository.has_object(mark):
                present += 1
            else:
                md5 = file_md5(path)
                if mark is not None and mark.md5 != md5:
                    problems.append(
                        f"{path} differs from the page published under this key (MD5 {mark.md5}, here {md5}): "
                        "the published one stays"
                    )
                    continue
                repository.add_object(path, md5)
                if mark is None:
                    identity = canonical_json(store.load_identity(page.namespace)).decode("ascii")
                    wanted = PublishedPage(
                        path=path,
                        md5=md5,
                        nbytes=page.nbytes,
                        namespace=page.namespace,
                        key=page.key,
                        parent=page.parent,
                        first=page.first,
                        num_tokens=page.num_tokens,
                        prefix=wanted_name,
                        identity_text=identity,
                    )
                if wanted is not None:
                    with store.writing():
                        write_mark(wanted)
                moved += 1
                moved_bytes += page.nbytes
            done += page.nbytes
            progress(done, total)
    return Outcome(moved, moved_bytes, present, tuple(problems))


def _find_mark(path: Path) -> PublishedPage | None:
    """The mark beside an artifact; None if there is none that can be read: publishing then writes it anew."""
    mark_path = path.with_name(f"{path.name}.dvc")
    if not os.path.lexists(mark_path):
        return None
    try:
        return read_mark(mark_path)
    except ArtifactError:
        return None


def push(
    repository: Repository, remote: Remote, pages: Sequence[PublishedPage], progress: Progress = _ignore
) -> Outcome:
    """Send the objects of published pages to a remote, those it has already excepted.

    Problems are pages whose data is neither here nor there. Raises SharingError when the remote fails; what was sent
    until then stays sent.
    """
    total = sum(page.nbytes for page in pages)
    done = 0

    def send(page: PublishedPage) -> str:
        if remote.has(page):
            return "present"
        if not repository.has_sound_object(page):
            if not page.is_here or file_md5(page.path) != page.md5:
                return f"{page.key.hex()}: neither here nor in remote {remote.name}; publish it where it was computed"
            repository.add_object(page.path, page.md5)
        remote.send(page)
        return "moved"

    results = []
    with ThreadPoolExecutor(JOBS) as executor:
        for page, result in zip(pages, executor.map(send, pages), strict=True):
            results.append((page, result))
            done += page.nbytes
            progress(done, total)
    return _outcome(results)


def pull(
    store: Store,
    repository: Repository,
    find_remote: Callable[[], Remote],
    pages: Sequence[PublishedPage],
    progress: Progress = _ignore,
) -> Outcome:
    """Bring published pages into the store, from the cache or else from a remote, in the order given.

    A remote is asked for only when the cache lacks something. Raises SharingError when the remote fails and
    ArtifactError when it sends something else; the pages before that one are in the store then.
    """
    total = sum(page.nbytes for page in pages)
    done = 0
    results = []
    missing = [page for page in pages if not page.is_here and not repository.has_object(page)]
    remote = find_remote() if missing else None
    arriving = _start_receiving(remote, missing) if remote is not None else {}
    try:
        for page in pages:
            is_new = not page.is_here
            if page.key in arriving:
                arriving[page.key].result()
            if is_new:
                _place(store, repository, page, find_remote)
            if is_new or store.find_row(page.key) is None:
                _adopt(store, page)
            results.append((page, "moved" if is_new else "present"))
            done += page.nbytes
            progress(done, total)
    except Exception:
        wait([future for future in arriving.values() if not future.cancel()])
        raise
    return _outcome(results)


def _start_receiving(remote: Remote, pages: Sequence[PublishedPage]) -> dict[bytes, "Future[None]"]:
    """Receive objects into the cache, several at once and in this order; a future for each page's key.

    Not an executor: the end of a process waits for its threads, and so for a remote that does not answer.
    """
    futures: dict[bytes, Future[None]] = {page.key: Future() for page in pages}
    rest = iter(pages)
    lock = threading.Lock()

    def receive() -> None:
        while True:
            with lock:
                page = next(rest, None)
            if page is None:
                return
            future = futures[page.key]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                remote.receive(page)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

    for number in range(min(JOBS, len(pages))):
        try:
            threading.Thread(target=receive, name="kestrel-receive", daemon=True).start()
        except RuntimeError:  # the process may have no more threads: those there are do it all
            if not number:
                raise
            break
    return futures


def _adopt(store: Store, page: PublishedPage) -> None:
    try:
        store.adopt(page.path)
    except ArtifactError as error:  # published as it is: DVC's digest fits, but it is no artifact
        store.quarantine(page.path, str(error))
        raise


def _place(
    store: Store, repository: Repository, page: PublishedPage, find_remote: Callable[[], Remote]
) -> None:
    """Put a page's object from the cache into the store; a damaged one is fetched again, once."""

    def place() -> bool:
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with store.writing():
            store.write_identity(page.namespace, page.identity_text.encode("ascii"))
            return repository.place_object(page)

    try:
        is_new = place()
    except ArtifactError:
        repository.drop_object(page.md5)
        find_remote().receive(page)
        is_new = place()
    if is_new:
        repository.note_digest(page)


def withdraw(listing: Listing, ends: Iterable[PublishedPage]) -> list[PublishedPage]:
    """Unpublish prefixes: their pages, except those another published prefix needs. Returns what was withdrawn.

    Only marks go. Artifacts stay in the store, from now on as evictable as any; objects stay in DVC's cache and
    remotes, where earlier commits may need them, until `dvc gc`. SharingError for a page others continue.
    """
    gone: dict[bytes, PublishedPage] = {}
    for end in ends:
        children = [page for page in listing.pages if page.parent == end.key and page.key not in gone]
        if children:
            raise SharingError(
                f"page {end.key.hex()} is continued by {len(children)} published pages, such as "
                f"{children[0].key.hex()}; withdraw those first"
            )
        for page in reversed(listing.chain(end)):
            is_needed = any(child.parent == page.key and child.key not in gone for child in listing.pages)
            if is_needed or (page.prefix is not None and page is not end):
                break
            gone[page.key] = page
    for page in gone.values():  # children come before their parents
        page.mark_path.unlink(missing_ok=True)
    return list(gone.values())


def free(
    repository: Repository, remote: Remote, pages: Iterable[PublishedPage], dry_run: bool
) -> list[PublishedPage]:
    """Remove cached objects that the store no longer names and that the remote has; returns those pages.

    This is what gives the disk its bytes back after a published page was evicted from the store.
    """
    freed = []
    for page in pages:
        if not page.is_here and repository.has_object(page) and remote.has(page):
            if not dry_run:
                repository.drop_object(page.md5)
            freed.append(page)
    return freed


def open_repository(root: Path) -> Repository:
    """The DVC repository that a store's root is in. SharingError if it is in none."""
    folder = find_repository(root)
    if folder is None:
        raise SharingError(
            f"{os.path.abspath(root)} (cache.root) is not inside a DVC repository; run `git init && dvc init` above it"
        )
    return Repository(folder)


def _outcome(results: Sequence[tuple[PublishedPage, str]]) -> Outcome:
    moved = [page for page, result in results if result == "moved"]
    problems = tuple(result for _, result in results if result not in ("moved", "present"))
    return Outcome(
        len(moved), sum(page.nbytes for page in moved), len(results) - len(moved) - len(problems), problems
    )
