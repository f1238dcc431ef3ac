"""Forgetting one session: its pages in memory and in the store, and nobody else's."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kestrel.cache.scope import Course, Scope
from kestrel.cache.sequence import PrefixCache
from kestrel.identity import branch_key


@dataclass(frozen=True)
class Purged:
    """Pages that left the store, and pages of the session that stay: in use, pinned, or continued by one that is."""

    removed: int
    kept: int


def purge_session(cache: PrefixCache, scope: Scope, key: bytes) -> Purged:
    """Forget the session whose prefix ended with the page of this key.

    A session is a line of pages: the page itself, whatever continues it (later turns), and the pages before it back
    to the last one that something else continues too, or that is part of a shared prefix. What other prefixes
    need is kept. A page that is being computed on is forgotten, but saved again when that request ends.
    """
    size = cache.engine.pool.page_tokens
    shared_keys: set[bytes] = set()
    roots = {scope.namespace.digest}
    for prefix in cache.shared:
        keys = Course(cache.common, cache.common, len(prefix), len(prefix) // size).keys(prefix, size)
        shared_keys.update(keys)
        roots.update(branch_key(each, scope.namespace) for each in keys)
    if cache.writer is not None:
        cache.writer.drain()
    rows = {}
    if cache.store is not None:
        rows = {row.key: row for row in cache.store.list_pages(scope.namespace.digest)}
    stored = {row.key: row.parent for row in rows.values()}
    in_ram = {page.key: page.parent for page in cache.engine.pool.remembered()}
    if key in stored or _root(key, {**in_ram, **stored}) in roots:  # else it is somebody else's
        cache.engine.pool.forget(_line(key, in_ram, shared_keys))
    if cache.store is None:
        return Purged(0, 0)
    line = _line(key, stored, shared_keys)
    removed = cache.store.remove(rows[each] for each in line)
    return Purged(len(removed), len(line) - len(removed))


def _root(key: bytes, parents: Mapping[bytes, bytes]) -> bytes:
    """What the first page of a prefix names as its parent, as far as the pages before it are known."""
    while key in parents:
        key = parents[key]
    return key


def _line(key: bytes, parents: Mapping[bytes, bytes], kept: Collection[bytes]) -> list[bytes]:
    """The keys of a session among pages given with their parents, those it ends with first."""
    if key not in parents:
        return []
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    line = [key]
    for each in line:  # grows while it is walked
        line += children[each]
    line.reverse()
    before = parents[key]
    while before in parents and len(children[before]) == 1 and before not in kept:
        line.append(before)
        before = parents[before]
    return [each for each in line if each not in kept]
