"""What is under the root: tells artifacts, the store's own files, leftovers and strangers apart and counts them."""

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kestrel.store.catalog import CATALOG_FILES
from kestrel.store.files import TEMP_NAME, FileTree, Names

LOCK_NAME = "lock"
QUARANTINE_NAME = "quarantine"
IDENTITY_NAME = "identity.json"
NAMESPACE_NAME = re.compile(r"[0-9a-f]{16}")
PAGE_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
PAGE_NAME = re.compile(r"([0-9a-f]{32})\.safetensors")
MARK_SUFFIX = ".dvc"  # beside an artifact: its page is published, part of the repository the store lies in

# A change within the same tick of the file system's clock as our look leaves the folder's time as it was. Ticks
# are some milliseconds, or 2 s where times are whole seconds.
TICK_NS = 50_000_000
COARSE_TICK_NS = 2_500_000_000


def is_settled(modified_ns: int, listed_ns: int) -> bool:
    """Whether a change after a folder was listed would have given it another time than this one."""
    return modified_ns + (COARSE_TICK_NS if modified_ns % 1_000_000_000 == 0 else TICK_NS) < listed_ns


@dataclass
class Folder:
    """One folder as it was when last listed."""

    modified_ns: int
    listed_ns: int
    folders: list[str] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)  # regular files named like artifacts
    misfits: list[str] = field(default_factory=list)  # links, folders and so on named like artifacts
    temps: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # the store's own files, quarantined files, strangers

    def is_as(self, modified_ns: int) -> bool:
        """Whether the listing still holds for a folder with this modification time."""
        return self.modified_ns == modified_ns and is_settled(modified_ns, self.listed_ns)


@dataclass(frozen=True)
class Quarantined:
    """A file that was moved out of the way."""

    names: Names
    nbytes: int
    num_links: int
    modified_ns: int


@dataclass(frozen=True)
class Count:
    """The result of a walk. Catalog and artifacts are not counted: the catalog knows the one and is the other."""

    own_bytes: int  # identity files and marks of published pages
    strangers: int
    stranger_bytes: int
    quarantined: tuple[Quarantined, ...]  # oldest first
    misfits: tuple[Names, ...]
    temps: tuple[Names, ...]
    temp_bytes: int
    listed: tuple[Names, ...]  # page folders that were listed anew
    vanished: tuple[Names, ...]  # page folders that are gone since the last walk

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of all quarantined files."""
        return sum(file.nbytes for file in self.quarantined)

    @property
    def other_bytes(self) -> int:
        """Bytes of everything but artifacts and catalog."""
        return self.own_bytes + self.stranger_bytes + self.quarantined_bytes + self.temp_bytes


class Census:
    """Walks the root again and again, listing only the folders that changed since.

    With 100,000 artifacts in 256 folders a walk that finds nothing new is a few hundred stat calls.
    """

    def __init__(self, tree: FileTree) -> None:
        self.tree = tree
        self.folders: dict[Names, Folder] = {}
        self.num_walks = 0

    def walk(self) -> Count:
        """Look at every folder; raises OSError if the root cannot be read."""
        own_bytes = strangers = stranger_bytes = temp_bytes = 0
        quarantined: list[Quarantined] = []
        misfits: list[Names] = []
        temps: list[Names] = []
        listed: list[Names] = []
        found: dict[Names, Folder] = {}
        for names, folder, is_new in self.walk_folders():
            found[names] = folder
            if is_new and is_page_folder(names):
                listed.append(names)
            misfits.extend((*names, name) for name in folder.misfits)
            path = os.path.join(self.tree.root, *names)
            for name in folder.temps:
                status = find_status(path, name)
                if status is not None:
                    temps.append((*names, name))
                    temp_bytes += status.st_size
            for name in folder.others:
                status = find_status(path, name)
                if status is None:
                    continue
                if is_own(names, name):
                    own_bytes += status.st_size
                elif names == (QUARANTINE_NAME,):
                    file = Quarantined((*names, name), status.st_size, status.st_nlink, status.st_mtime_ns)
                    quarantined.append(file)
                else:
                    strangers += 1
                    stranger_bytes += status.st_size
        vanished = [names for names in self.folders if is_page_folder(names) and names not in found]
        self.folders = found
        self.num_walks += 1
        quarantined.sort(key=lambda file: file.modified_ns)
        return Count(
            own_bytes=own_bytes,
            strangers=strangers,
            stranger_bytes=stranger_bytes,
            quarantined=tuple(quarantined),
            misfits=tuple(misfits),
            temps=tuple(temps),
            temp_bytes=temp_bytes,
            listed=tuple(listed),
            vanished=tuple(vanished),
        )

    def expect(self, names: Names) -> None:
        """Remember a folder that the store has just put an artifact into, so that its loss is noticed."""
        self.folders.setdefault(names, Folder(modified_ns=0, listed_ns=0))

    def pages_in(self, names: Names) -> list[str]:
        """Names of the artifacts in a page folder, as last listed."""
        return self.folders[names].pages if names in self.folders else []

    def walk_folders(self) -> Iterator[tuple[Names, Folder, bool]]:
        """Every folder below the root and the root itself, with its listing and whether that is new."""
        pending: list[Names] = [()]
        while pending:
            names = pending.pop()
            path = os.path.join(self.tree.root, *names)
            before = self.folders.get(names)
            try:
                status = os.stat(path, follow_symlinks=not names)
                if not stat.S_ISDIR(status.st_mode):
                    continue
                is_new = before is None or not before.is_as(status.st_mtime_ns)
                folder = self.list_folder(names, status.st_mtime_ns) if before is None or is_new else before
            except OSError as error:
                gone = bool(names) and isinstance(error, FileNotFoundError)
                if not gone and not is_strange(names):
                    raise
                continue  # a stranger's folder that cannot be read cannot be counted either
            pending.extend((*names, name) for name in folder.folders)
            yield names, folder, is_new

    def list_folder(self, names: Names, modified_ns: int) -> Folder:
        """List one folder and sort its entries."""
        folder = Folder(modified_ns, time.time_ns())
        with self.tree.folder(names) as fd, os.scandir(fd) as entries:
            for entry in entries:
                name = entry.name
                if is_page_folder(names) and is_page_name(names, name):
                    regular = entry.is_file(follow_symlinks=False)
                    (folder.pages if regular else folder.misfits).append(name)
                elif entry.is_dir(follow_symlinks=False):
                    folder.folders.append(name)
                elif (
                    TEMP_NAME.fullmatch(name) and len(names) in (1, 2) and NAMESPACE_NAME.fullmatch(names[0])
                ):
                    folder.temps.append(name)
                elif names or name not in CATALOG_FILES:
                    folder.others.append(name)
        return folder


def find_status(folder: str, name: str) -> os.stat_result | None:
    """lstat of a file that was listed a moment ago, or None if it is gone."""
    try:
        return os.stat(os.path.join(folder, name), follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_strange(names: Names) -> bool:
    """Whether a folder is none of the store's own."""
    return (
        names not in ((), (QUARANTINE_NAME,))
        and not is_page_folder(names)
        and not (len(names) == 1 and NAMESPACE_NAME.fullmatch(names[0]))
    )


def is_page_folder(names: Names) -> bool:
    """Whether these names lead to a folder of artifacts."""
    return (
        len(names) == 2
        and NAMESPACE_NAME.fullmatch(names[0]) is not None
        and PAGE_FOLDER_NAME.fullmatch(names[1]) is not None
    )


def is_page_name(folder: Names, name: str) -> bool:
    """Whether a file of this name belongs into this page folder."""
    return PAGE_NAME.fullmatch(name) is not None and name[:2] == folder[1]


def is_own(folder: Names, name: str) -> bool:
    """Whether a file that is no artifact is the store's own, or the mark of a published page."""
    if not folder:
        return name == LOCK_NAME
    if is_page_folder(folder):
        return name.endswith(MARK_SUFFIX) and is_page_name(folder, name.removesuffix(MARK_SUFFIX))
    return len(folder) == 1 and name == IDENTITY_NAME and NAMESPACE_NAME.fullmatch(folder[0]) is not None
