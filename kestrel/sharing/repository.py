"""The DVC repository around a store: its cache, its remotes, its lock. The only module that imports DVC.

Objects go by their MD5, one at a time, so nothing here depends on how many pages are published: DVC's graph of
all `.dvc` files is never built. What this leaves behind, `dvc status`, `dvc push` and `dvc pull` understand.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel.errors import ArtifactError, SharingError
from kestrel.sharing.mark import PublishedPage

if TYPE_CHECKING:
    from dvc.data_cloud import Remote as DvcRemote

READ_NBYTES = 1 << 20
PARTS = "kestrel"  # folder below DVC's cache for objects that are still arriving

# What link() answers where hard links cannot be had.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

Progress = Callable[[int], None]  # called with bytes that have just been moved


def find_repository(root: Path) -> Path | None:
    """The folder of the DVC repository that a store's root is in, or None. Touches DVC not at all.

    A folder that cannot be looked into is none.
    """
    here = Path(os.path.abspath(root))
    return next(
        (folder for folder in (here, *here.parents) if os.path.isfile(folder / ".dvc" / "config")), None
    )


def file_md5(path: Path) -> str:
    """MD5 of a file, as DVC names it. ArtifactError if it cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(READ_NBYTES):
                digest.update(chunk)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error
    return digest.hexdigest()


class Repository:
    """One DVC repository. Thread-safe; what changes the cache waits for DVC's lock as long as another command holds it.

    The lock is held while the cache changes, never while a remote is waited for.
    """

    def __init__(self, folder: Path) -> None:
        """Open the repository whose root is `folder`; SharingError."""
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        self.folder = folder
        try:
            self._repo = Repo(str(folder), _wait_for_lock=True)
        except (DvcException, OSError) as error:
            raise SharingError(f"DVC cannot open {folder}: {error}") from error
        self._threads = threading.Lock()
        self._parts = Path(self._repo.cache.local_cache_dir) / PARTS
        self._sweep_parts()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from dvc.exceptions import DvcException

        try:
            with self._threads, self._repo.lock:
                yield
        except (DvcException, OSError) as error:
            raise SharingError(f"DVC's cache of {self.folder}: {error}") from error

    # The cache

    def object_path(self, md5: str) -> Path:
        """Where the cache keeps an object, or would."""
        return Path(self._repo.cache.local.oid_to_path(md5))

    def has_object(self, page: PublishedPage) -> bool:
        """Whether the cache holds the page's object, as far as its size tells."""
        try:
            return self.object_path(page.md5).stat().st_size == page.nbytes
        except FileNotFoundError:
            return False

    def has_sound_object(self, page: PublishedPage) -> bool:
        """Whether the cache holds the page's object, every byte of it read."""
        return self.has_object(page) and file_md5(self.object_path(page.md5)) == page.md5

    def add_object(self, path: Path, md5: str) -> None:
        """Put a file into the cache: the same file under a second name where the file system has hard links.

        The object appears whole or not at all. DVC's own way begins with an empty file under the final name.
        """
        from dvc_data.hashfile.hash_info import HashInfo

        with self._locked():
            cache = self._repo.cache.local
            target = self.object_path(md5)
            cache.makedirs(str(target.parent))
            if target.exists() and (target.stat().st_size != path.stat().st_size or file_md5(target) != md5):
                target.unlink()  # damaged, or what a killed `dvc add` left behind
            if not target.exists():
                with self.arriving() as temp:
                    self._link_or_copy(path, target, temp)
            cache.protect(str(target))
            # DVC then knows their digest and does not read them.
            for name in (str(target), os.path.abspath(path)):
                self._repo.state.save(name, self._repo.fs, HashInfo("md5", md5))

    def drop_object(self, md5: str) -> None:
        """Remove an object from the cache. Whoever has it under another name keeps that."""
        with self._locked():
            self.object_path(md5).unlink(missing_ok=True)

    def place_object(self, page: PublishedPage) -> bool:
        """Give the cache's object its name in the store; False if something has that name already: it stays.

        Reads it first: ArtifactError if it is damaged. The caller holds the store's lock, as the store takes other
        people's temporary files for leftovers; so DVC's lock, which may be held for hours, is not waited for here.
        """
        source = self.object_path(page.md5)
        if not self.has_sound_object(page):
            raise ArtifactError(f"{source} is damaged: expected {page.nbytes} bytes with MD5 {page.md5}")
        for folder in (page.path.parent.parent, page.path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temp = page.path.with_name(f".kestrel-{secrets.token_hex(8)}.tmp")
            self._link_or_copy(source, page.path, temp)
        except FileExistsError:
            return False
        return True

    def note_digest(self, page: PublishedPage) -> None:
        """Tell DVC the digest of an artifact that was placed, so that `dvc status` need not read it."""
        from dvc_data.hashfile.hash_info import HashInfo

        with self._threads, suppress(Exception):  # it reads it then
            self._repo.state.save(os.path.abspath(page.path), self._repo.fs, HashInfo("md5", page.md5))

    def _link_or_copy(self, source: Path, target: Path, temp: Path) -> None:
        """Give a file a second name, or copy it by way of `temp`. FileExistsError if there is one already."""
        if self._links:
            try:
                os.link(source, target)
                return
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
        try:
            shutil.copyfile(source, temp)
            with open(temp, "rb") as file:
                os.fsync(file.fileno())
            if target.exists():
                raise FileExistsError(target)
            os.rename(temp, target)
        finally:
            temp.unlink(missing_ok=True)

    @property
    def _links(self) -> bool:
        """Whether the repository's configuration allows hard links between cache and store."""
        return "hardlink" in self._repo.cache.local.cache_types

    # Remotes

    def remote(self, name: str | None) -> "Remote":
        """A remote by name, or the default one. SharingError if there is none or its kind is not installed."""
        from dvc.exceptions import DvcException

        try:
            with self._threads:
                found: DvcRemote = self._repo.cloud.get_remote(name=name, command="push")
                self._repo.cloud.get_remote_odb(name, "push")  # refuses what has no objects by digest
        except (DvcException, ImportError) as error:
            raise SharingError(f"{error}") from error
        return Remote(self, found)

    @contextmanager
    def arriving(self) -> Iterator[Path]:
        """A new temporary file for an object that is to be received; gone when the block ends."""
        self._parts.mkdir(parents=True, exist_ok=True)
        path = self._parts / f"{secrets.token_hex(8)}.part"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells others that we are alive
            yield path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _sweep_parts(self) -> None:
        """Remove what killed processes left behind."""
        for path in self._parts.glob("*.part"):
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                path.unlink(missing_ok=True)


class Remote:
    """A DVC remote: objects by their digest. Every method raises SharingError with the remote's own words."""

    def __init__(self, repository: Repository, remote: "DvcRemote") -> None:
        self._repository = repository
        self._objects = remote.odb
        self.name = remote.name
        self.url = remote.fs.unstrip_protocol(remote.path)

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Each kind of remote has a client library with exceptions of its own, so all are caught."""
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            raise SharingError(f"cannot {action} remote {self.name} ({self.url}): {words}") from error

    def has(self, page: PublishedPage) -> bool:
        """Whether the remote has a page's object, as far as the size tells, where the remote tells that."""
        with self._errors("ask"):
            try:
                info = self._objects.fs.info(self._objects.oid_to_path(page.md5))
            except FileNotFoundError:
                return False
        return info.get("size") in (None, page.nbytes)

    def send(self, page: PublishedPage) -> None:
        """Copy a page's object from the cache to the remote, where it appears whole or not at all."""
        path = self._objects.oid_to_path(page.md5)
        with self._errors("write to"):
            self._objects.fs.put_file(str(self._repository.object_path(page.md5)), path)
            self._objects.protect(path)

    def receive(self, page: PublishedPage) -> None:
        """Copy a page's object from the remote into the cache; ArtifactError if what came is not that object."""
        with self._repository.arriving() as part:
            with self._errors("read from"):
                self._objects.fs.get_file(self._objects.oid_to_path(page.md5), str(part))
            found = part.stat().st_size
            if found != page.nbytes or file_md5(part) != page.md5:
                raise ArtifactError(
                    f"remote {self.name} ({self.url}) sent a damaged {page.path.name}: expected {page.nbytes} bytes "
                    f"with MD5 {page.md5}, found {found} bytes"
                )
            self._repository.add_object(part, page.md5)
