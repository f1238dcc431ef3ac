"""Files that are complete or absent: creating folders, publishing and removing files, the lock between processes.

Every path is (root, names): the root may be a symbolic link, since that is the user's choice of disk; no name
below it is ever followed if it is one.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from kestrel.errors import ArtifactError, StoreError
from kestrel.store.direct import FileWriter

TEMP_NAME = re.compile(r"\.kestrel-[0-9a-f]{16}\.tmp")
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a FIFO someone placed there would wait for a writer for ever.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
LOCK_POLL_SECONDS = 0.005

# What link() answers on file systems without hard links (FAT, some network and FUSE mounts).
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
# Open errors that say something about the process or the machine, nothing about the file.
NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}

Names = tuple[str, ...]


def page_names(namespace: bytes, key: bytes) -> Names:
    """Where an artifact lives below the root: <namespace, 16 digits>/<key, 2 digits>/<key>.safetensors."""
    name = key.hex()
    return namespace.hex()[:16], name[:2], f"{name}.safetensors"


class FileTree:
    """The folder tree of one store: folders are created durably, files appear whole or not at all.

    Methods raise OSError as the system gives it unless they say otherwise.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = FileWriter()
        # Folders (device, inode) known to survive a power cut. One that merely exists may have been created by
        # a process that was killed before its fsync.
        self.durable_folders: set[tuple[int, int]] = set()

    def create_root(self) -> None:
        """Create the root and its missing parents, durably."""
        missing = []
        folder = self.root
        while not folder.is_dir():
            missing.append(folder)
            if folder.parent == folder:
                break
            folder = folder.parent
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            fsync_folder(folder.parent)

    @contextmanager
    def folder(self, names: Names, create: bool = False) -> Iterator[int]:
        """A file descriptor of the folder `names` below the root, for use as dir_fd; closed on exit."""
        fd = os.open(self.root, FOLDER_FLAGS)
        try:
            for name in names:
                created = False
                if create:
                    try:
                        os.mkdir(name, 0o700, dir_fd=fd)
                        created = True
                    except FileExistsError:
                        pass
                child = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
                parent, fd = fd, child
                try:
                    if create:
                        self.make_durable(parent, child, created)
                finally:
                    os.close(parent)
            yield fd
        finally:
            os.close(fd)

    def make_durable(self, parent: int, child: int, created: bool) -> None:
        """Make sure the entry of the folder `child` in `parent` is on disk."""
        status = os.fstat(child)
        inode = (status.st_dev, status.st_ino)
        if created or inode not in self.durable_folders:
            os.fsync(parent)
            self.durable_folders.add(inode)

    def publish_file(self, names: Names, chunks: Iterable[Any]) -> bool:
        """Write a new file from byte buffers; False, and nothing changed, if something has that name already.

        The data is on disk before the name appears, and the name is on disk when this returns. On any error no
        temporary file stays behind. Where the file system has no hard links the caller must hold the store's
        lock, because look-then-rename is then all there is.
        """
        *folders, name = names
        with self.folder(tuple(folders), create=True) as folder:
            temp = f".kestrel-{secrets.token_hex(8)}.tmp"
            fd = os.open(temp, WRITE_FLAGS, 0o600, dir_fd=folder)
            try:
                try:
                    self.writer.write(fd, chunks)
                    # Data first: a name must never be on disk before what it names.
                    os.fsync(fd)
                finally:
                    os.close(fd)
                published = link_or_rename(folder, temp, name)
            finally:
                unlink_if_there(folder, temp)
            if published:
                os.fsync(folder)
            return published

    def open_file(self, names: Names) -> int:
        """Open a file for reading without following links or waiting for a FIFO; the caller closes it.

        Raises ArtifactError if it is missing, a link or unreadable; StoreError if the fault is not the file's.
        """
        try:
            with self.folder(names[:-1]) as folder:
                return os.open(names[-1], READ_FLAGS, dir_fd=folder)
        except OSError as error:
            message = f"cannot open {self.root.joinpath(*names)}: {error.strerror}"
            if error.errno in NOT_THE_FILE:
                raise StoreError(message) from error
            raise ArtifactError(message) from error

    def status(self, names: Names) -> os.stat_result | None:
        """lstat of a file, or None if it or a folder above is missing."""
        try:
            with self.folder(names[:-1]) as folder:
                return os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove_file(self, names: Names) -> bool:
        """Unlink a file, which may be a link or FIFO but not a folder; False if it was gone already."""
        try:
            with self.folder(names[:-1]) as folder:
                return unlink_if_there(folder, names[-1])
        except (FileNotFoundError, NotADirectoryError):
            return False

    def move(self, names: Names, target: Names) -> bool:
        """Rename within the tree to a name that must be unused; False if there was nothing to move."""
        with self.folder(target[:-1], create=True) as target_folder:
            try:
                with self.folder(names[:-1]) as folder:
                    os.rename(names[-1], target[-1], src_dir_fd=folder, dst_dir_fd=target_folder)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True


def link_or_rename(folder: int, temp: str, name: str) -> bool:
    """Give the temporary file its name unless the name is taken; never replaces."""
    try:
        os.link(temp, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        return False
    except FileNotFoundError:
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True


def unlink_if_there(folder: int, name: str) -> bool:
    """Unlink a name of a folder; False if it was not there."""
    try:
        os.unlink(name, dir_fd=folder)
        return True
    except FileNotFoundError:
        return False


def fsync_folder(path: Path) -> None:
    """Put the entries of a folder on disk."""
    fd = os.open(path, FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Holding(Enum):
    """How much of a store's lock one holds."""

    NOTHING = 0  # another thread of this process has it
    PROCESS = 1  # alone in this process, but another process has it
    ALL = 2


class FolderLock:
    """The right to publish into and delete from a store: one thread of one process at a time.

    Held while a page is written, so whoever holds it knows that every temporary file is a leftover, and that
    nobody else is using up the room it has just made. Readers never take it. The kernel drops it with the
    process, however that ends. Reentrant within a thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.threads = threading.RLock()
        self.depth = 0
        self.fd: int | None = None

    @contextmanager
    def held(self, timeout_seconds: float) -> Iterator[Holding]:
        """Wait for the lock for some time, and yield how much of it was got; releases it on exit.

        Raises OSError if the lock file cannot be created and StoreError if something else is in its place.
        """
        deadline = time.monotonic() + timeout_seconds
        if not self.threads.acquire(timeout=timeout_seconds):
            yield Holding.NOTHING
            return
        try:
            if self.fd is None:
                self.fd = self.lock_file(deadline)
            self.depth += 1
            try:
                yield Holding.PROCESS if self.fd is None else Holding.ALL
            finally:
                self.depth -= 1
                if self.depth == 0 and self.fd is not None:
                    os.close(self.fd)
                    self.fd = None
        finally:
            self.threads.release()

    def lock_file(self, deadline: float) -> int | None:
        """A descriptor that holds the lock, or None when the deadline passes first."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise StoreError(f"{self.path} must be a regular file; remove what is there")
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The root may have been deleted and made anew while we waited: then this lock is nobody's.
                if os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False)):
                    return fd
            except (BlockingIOError, FileNotFoundError):
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
                time.sleep(LOCK_POLL_SECONDS)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
