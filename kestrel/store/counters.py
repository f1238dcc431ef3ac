"""What a store has done since it was made."""

import threading
from collections import Counter

NAMES = (
    "published_pages",
    "published_bytes",
    "refused_pages",  # not written: the bytes of this hour are spent
    "present_pages",  # asked to publish, but the page was there
    "evicted_pages",
    "evicted_bytes",  # of pages and quarantined files
    "covered_pages",  # removed because a longer page holds all of it
    "quarantined_files",
    "deleted_quarantined_files",
    "adopted_pages",  # artifacts found that the catalog did not know
    "lost_pages",  # rows dropped because their artifact was gone
    "made_catalogs",
)


class Counters:
    """Numbers that only grow; thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Increase one; KeyError if it is not one of NAMES."""
        if name not in NAMES:
            raise KeyError(name)
        with self.lock:
            self.numbers[name] += amount

    def read(self) -> dict[str, int]:
        """All of them, in the order of NAMES."""
        with self.lock:
            return {name: self.numbers[name] for name in NAMES}
