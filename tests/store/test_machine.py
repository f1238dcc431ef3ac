"""Promise: through any sequence of operations, damage and restarts the store holds what a plain dict would."""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from kestrel.identity import as_tokens, page_key, prefix_sha256
from kestrel.store.store import PageRow, Store
from tests.store.pages import (
    IDENTITY,
    LAYOUT,
    NAMESPACE,
    all_bytes,
    all_files,
    fast_folder,
    open_store,
    payload_of,
    restore,
)

PAGE_TOKENS = 4
Prefix = tuple[int, ...]
# Full pages of two kinds, so that chains meet, and partial ones (or none) of all kinds.
full_pages = st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 0)])
partial_pages = st.lists(st.integers(0, 1), max_size=PAGE_TOKENS - 1).map(tuple)


class StoreMachine(RuleBasedStateMachine):
    """The model: prefix -> number of tokens of its last page, which is what is stored of it."""

    prefixes: Bundle[Prefix] = Bundle("prefixes")

    def __init__(self) -> None:
        super().__init__()
        self.folder = fast_folder()
        self.root = Path(self.folder.name) / "kv"
        self.store: Store = open_store(self.root)
        self.pages: dict[Prefix, int] = {}
        self.pinned: set[Prefix] = set()
        self.used: list[Prefix] = []  # least recently used first

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    # What the model knows

    def key(self, prefix: Prefix, size: int) -> bytes:
        first = len(prefix) - size
        parent = NAMESPACE.digest if not first else self.key(prefix[:first], PAGE_TOKENS)
        return page_key(parent, as_tokens(prefix[first:]))

    def is_leaf(self, prefix: Prefix) -> bool:
        return not any(
            len(other) - size == len(prefix) and other[: len(prefix)] == prefix
            for other, size in self.pages.items()
        )

    def forget(self, prefix: Prefix) -> None:
        del self.pages[prefix]
        self.pinned.discard(prefix)
        self.used.remove(prefix)

    def path(self, prefix: Prefix) -> Path:
        return self.store.page_path(NAMESPACE.digest, self.key(prefix, self.pages[prefix]))

    # What can happen

    @initialize(target=prefixes)
    def nothing(self) -> Prefix:
        return ()

    @rule(target=prefixes, before=prefixes, full=st.lists(full_pages, max_size=3), rest=partial_pages)
    def publish(self, before: Prefix, full: list[Prefix], rest: Prefix) -> MultipleResults[Prefix]:
        """Save a session: it continues another one by some full pages and perhaps a partial one."""
        saved = [before[: len(before) // PAGE_TOKENS * PAGE_TOKENS]]
        for tokens in [*full, *([rest] if rest else [])]:
            saved.append(saved[-1] + tokens)
            self.publish_page(saved[-1], len(tokens))
        return multiple(*saved)

    def publish_page(self, prefix: Prefix, size: int) -> None:
        first = len(prefix) - size
        key = self.key(prefix, size)
        parent = self.key(prefix[:first], PAGE_TOKENS) if first else NAMESPACE.digest
        written = self.store.publish(
            NAMESPACE,
            IDENTITY,
            LAYOUT,
            key,
            parent,
            first,
            as_tokens(prefix[first:]),
            prefix_sha256(as_tokens(prefix)),
            payload_of(key, size),
        )
        assert (written > 0) == (prefix not in self.pages)
        if written:
            self.pages[prefix] = size
            self.used.append(prefix)
            assert written == self.path(prefix).stat().st_size

    @rule(prompt=st.lists(st.integers(0, 1), max_size=11), before=prefixes)
    def find(self, before: Prefix, prompt: list[int]) -> None:
        tokens = before + tuple(prompt)

        def reach(covered: int) -> int:
            best = covered
            for prefix, size in self.pages.items():
                first = len(prefix) - size
                if first == covered and prefix[:first] == tokens[:first]:
                    same = [a == b for a, b in zip(prefix[first:], tokens[first:], strict=False)]
                    used = same.index(False) if False in same else len(same)
                    best = max(best, reach(len(prefix)) if used == size else first + used)
            return best

        expected = reach(0)
        assert restore(self.store, as_tokens(tokens), PAGE_TOKENS) == expected

    @rule(prefix=prefixes)
    def touch(self, prefix: Prefix) -> None:
        if prefix in self.pages:
            self.store.touch([self.key(prefix, self.pages[prefix])])
            self.used.remove(prefix)
            self.used.append(prefix)

    @rule(prefix=prefixes, pinned=st.booleans())
    def pin(self, prefix: Prefix, pinned: bool) -> None:
        if prefix in self.pages:
            key = self.key(prefix, self.pages[prefix])
            assert (self.store.pin if pinned else self.store.unpin)([key]) == 1
            (self.pinned.add if pinned else self.pinned.discard)(prefix)

    @rule(files=st.sampled_from([0, 2, 4, 6, 8, 10]), guarded=prefixes)
    def evict(self, files: int, guarded: Prefix) -> None:
        self.store.close()
        self.store = open_store(self.root, max_files=files)
        kept = {self.key(guarded, self.pages[guarded])} if guarded in self.pages else set()
        with self.store.protect(kept):
            planned = self.store.sweep(dry_run=True)
            assert {row.key for row in self.store.list_pages()} == {
                self.key(p, n) for p, n in self.pages.items()
            }
            done = self.store.sweep()
        assert [eviction.path for eviction in planned] == [eviction.path for eviction in done]
        expected = []
        while len(self.pages) > files:
            free = [p for p in self.used if self.is_leaf(p) and p not in self.pinned and p != guarded]
            if not free:
                break
            expected.append(self.key(free[0], self.pages[free[0]]))
            self.forget(free[0])
        assert [eviction.key for eviction in done] == expected
        self.store.close()
        self.store = open_store(self.root)

    @rule(prefix=prefixes)
    def remove_covered(self, prefix: Prefix) -> None:
        if prefix not in self.pages:
            return
        first = len(prefix) - self.pages[prefix]
        parent = self.key(prefix[:first], PAGE_TOKENS) if first else NAMESPACE.digest
        expected = [
            other
            for other, size in self.pages.items()
            if len(other) - size == first
            and len(other) < len(prefix)
            and other == prefix[: len(other)]
            and self.is_leaf(other)
            and other not in self.pinned
        ]
        assert self.store.remove_covered(NAMESPACE, parent, as_tokens(prefix[first:])) == len(expected)
        for other in expected:
            self.forget(other)

    @rule(prefix=prefixes, how=st.sampled_from(["delete", "cut", "flip", "quarantine"]))
    def damage(self, prefix: Prefix, how: str) -> None:
        """A file is damaged; a request that meets it drops it."""
        if prefix not in self.pages:
            return
        path = self.path(prefix)
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-3])
        elif how == "flip":
            content = bytearray(path.read_bytes())
            content[-40] ^= 1
            path.write_bytes(content)
        if how == "quarantine":
            self.store.quarantine(path, "a test")
        else:
            damaged = [] if how == "delete" else [path]  # what is gone is noticed before anything is read
            assert [name for name, _ in self.store.verify(quarantine=True).damaged] == damaged
        self.forget(prefix)

    @rule(catalog=st.sampled_from(["kept", "deleted"]))
    def reopen(self, catalog: str) -> None:
        self.store.close()
        if catalog == "deleted":
            for path in self.root.glob("catalog.sqlite3*"):
                path.unlink()
            self.pinned.clear()
        self.store = open_store(self.root)
        if catalog == "deleted":
            # The order of use is gone with the catalog; times of writing stand in for it.
            order = {row.key: row.turn for row in self.store.list_pages()}
            self.used.sort(key=lambda prefix: order[self.key(prefix, self.pages[prefix])])

    # What must hold

    @invariant()
    def holds_the_same(self) -> None:
        rows: dict[bytes, PageRow] = {row.key: row for row in self.store.list_pages()}
        assert set(rows) == {self.key(prefix, size) for prefix, size in self.pages.items()}
        for prefix, size in self.pages.items():
            row = rows[self.key(prefix, size)]
            assert (row.first, row.num_tokens) == (len(prefix) - size, size)
            assert row.pinned == (prefix in self.pinned)
            assert (row.num_children == 0) == self.is_leaf(prefix)
        assert [row.key for row in self.store.list_pages()] == [
            self.key(prefix, self.pages[prefix]) for prefix in reversed(self.used)
        ]

    @invariant()
    def counts_everything(self) -> None:
        usage = self.store.usage()
        assert usage.bytes == all_bytes(self.root)
        assert (usage.files, usage.tokens) == (len(self.pages), sum(self.pages.values()))
        assert usage.strangers == 0
        assert not [path for path in all_files(self.root) if path.suffix == ".tmp"]


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
test_machine = StoreMachine.TestCase
