"""Forgetting one session: its pages in memory and in the store, and nobody else's."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kestrel.cache.prefix import PrefixCache
from kestrel.cache.scope import Course, Scope
from kestrel.identity import branch_key


@dataclass(frozen=True)
class Purged:
    """Pages that left the store, and pages of the session that stay: in use, pinned, or continued by one that is."""

    removed: int
    kept: int


def purge_session(cache: PrefixCache, scope: Scope, key: bytes) -> Purged:
    """Forget the session whose prefix ended with the page of this key. May be called from any thread.

    A session is a line of pages: the page itself, whatever continues it (later turns), and the pages before it back
    to the last one that something else continues too, or that is part of a shared prefix. What other prefixes, or
    other requests that run, need is kept. A running request that continues the page is answered to its end, but
    what it computes is forgotten with the rest.
    """
    size = cache.engine.pool.page_tokens
    kept: set[bytes] = set()
    roots = {scope.namespace.digest}
    for prefix in cache.shared:
        keys = Course(cache.common, cache.common, len(prefix), len(prefix) // size).keys(prefix, size)
        kept.update(keys)
        roots.update(branch_key(each, scope.namespace) for each in keys)
    ends, parents = {key}, dict[bytes, bytes]()
    for sequence in cache.running.all():
        if sequence.scope.namespace != scope.namespace:
            continue
        place = sequence.find_page(key)
        if place is None:
            kept.update(sequence.keys)
            continue
        sequence.forget()
        parent, longer = place
        ends.update(longer)
        parents.update(dict.fromkeys(longer, parent))
    if cache.writer is not None:
        cache.writer.drain()
    rows = {}
    if cache.store is not None:
        rows = {row.key: row for row in cache.store.list_pages(scope.namespace.digest)}
    stored = {row.key: row.parent for row in rows.values()}
    in_ram = {page.key: page.parent for page in cache.engine.pool.remembered()}
    if key not in stored and key not in parents:  # it could not be saved: what comes before it is
        before = in_ram.get(key)
        while before is not None and before not in stored:
            before = in_ram.get(before)
        if before is not None:
            parents[key] = before
    if key in stored or _root(key, {**in_ram, **stored, **parents}) in roots:  # else it is somebody else's
        cache.engine.pool.forget(_line(ends, parents, in_ram, kept))
    if cache.store is None:
        return Purged(0, 0)
    line = _line(ends, parents, stored, kept)
    removed = cache.store.remove(rows[each] for each in line)
    return Purged(len(removed), len(line) - len(removed))


def _root(key: bytes, parents: Mapping[bytes, bytes]) -> bytes:
    """What the first page of a prefix names as its parent, as far as the pages before it are known."""
    while key in parents:
        key = parents[key]
    return key


def _line(
    ends: Collection[bytes],
    parents: Mapping[bytes, bytes],
    known: Mapping[bytes, bytes],
    kept: Collection[bytes],
) -> list[bytes]:
    """The keys of a session among the `known` pages, given with their parents.

    ends: pages in one place of the prefix from which it is followed both ways; parents: of those that may not be known.
    """
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for child, parent in known.items():
        children[parent].append(child)
    line = [end for end in ends if end in known]
    before = next((known.get(end) or parents[end] for end in ends if end in known or end in parents), None)
    for each in line:  # grows while it is walked
        line += children[each]
    while before is not None and before in known and before not in kept:
        if not set(children[before]) <= set(line):
            break
        line.append(before)
        before = known[before]
    return [each for each in line if each not in kept]
