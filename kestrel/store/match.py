"""Finding the longest stored prefix of a prompt, to the token, whatever mix of page sizes is stored."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kestrel.identity import Namespace, Tokens, as_tokens, page_key
from kestrel.store.catalog import Catalog, StoredPage, little_endian, order_bytes
from kestrel.store.files import page_names


@dataclass(frozen=True)
class PageRef:
    """One page of a match: what to open, and everything the opened file must agree with."""

    key: bytes
    parent: bytes
    first: int  # position of the page's first token
    num_tokens: int  # tokens the page holds
    num_used: int  # tokens of it that match, from its start; less than num_tokens in the last page only
    path: Path
    nbytes: int  # of the file
    namespace: bytes = field(repr=False)  # full digest
    token_bytes: bytes = field(repr=False)  # all num_tokens ids, int32 little-endian
    prefix_sha256: str = field(repr=False)  # of the tokens in [0, first + num_tokens)


@dataclass(frozen=True)
class Match:
    """The pages that cover the positions [0, num_tokens) of a prompt, in order; none if it missed."""

    pages: tuple[PageRef, ...]
    num_tokens: int
    reason: str | None  # why it missed; None for a hit
    diverged_at: int | None  # position where the nearest stored page has another token; None if none has


class Trail(NamedTuple):
    """A way from position 0 through stored pages, as a linked list from its last page back."""

    previous: "Trail | None"
    page: StoredPage
    num_used: int  # tokens used of the last page
    num_tokens: int  # covered from position 0
    nbytes: int  # of all its files


@dataclass(frozen=True)
class Start:
    """Where a search begins when that is not position 0: behind pages that another namespace holds."""

    parent: bytes  # what the first page names as its parent (identity.branch_key)
    first: int  # its position


class Place(NamedTuple):
    """The end of a trail, where children of its last page may lead on."""

    parent: bytes  # key of the last page, or the namespace digest
    trail: Trail | None
    taken: bytes | None  # the child that has been followed already


def find_prefix(
    catalog: Catalog,
    root: Path,
    namespace: Namespace,
    tokens: Tokens,
    page_tokens: int,
    min_match: int,
    start: Start | None = None,
) -> Match:
    """The longest prefix of `tokens` that the pages in the catalog cover; of equally long ones the least to read.

    Full pages of `page_tokens` are looked up by key, one after the other. Only where they end, and where a page
    has several children and the prompt is not covered yet, the children are searched: for one that is matched
    whole (a partial page, or a page of another size) to go on from, and for the one with the longest common
    token prefix to end with. Nothing on disk is looked at. A prefix shorter than `min_match` is a miss.

    With a `start` the match covers [start.first, num_tokens) only; `tokens` still count from position 0.
    """
    start = start or Start(namespace.digest, 0)
    search = Search(catalog, namespace, tokens, page_tokens, start)
    trail = search.longest_trail()
    if trail is None:
        if catalog.find_next_child(namespace.digest, start.parent, b"") is None:
            return Match((), 0, "no page of this model identity is stored", None)
        if not len(tokens):
            return Match((), 0, "there are no tokens to look for", None)
        return Match((), 0, "no stored page begins with the first token", start.first)
    diverged_at = trail.num_tokens if search.diverges_behind(trail) else None
    if trail.num_tokens < min_match:
        reason = f"the nearest page shares {trail.num_tokens} tokens, fewer than min_match {min_match}"
        return Match((), 0, reason, diverged_at)
    pages = page_refs(root, namespace, search.tokens, trail, start)
    return Match(pages, trail.num_tokens, None, diverged_at)


def page_refs(
    root: Path, namespace: Namespace, tokens: Tokens, trail: Trail, start: Start
) -> tuple[PageRef, ...]:
    """The pages of a trail in order, with the prefix digests that the prompt's own tokens demand of them."""
    trails: list[Trail] = []
    step: Trail | None = trail
    while step is not None:
        trails.append(step)
        step = step.previous
    digest = hashlib.sha256(tokens[: start.first].tobytes())
    refs = []
    for step in reversed(trails):
        page = step.page
        first = step.num_tokens - step.num_used
        token_bytes = tokens[first : step.num_tokens].tobytes()
        if step.num_used < page.num_tokens:
            token_bytes = little_endian(page.tokens)
        digest.update(token_bytes)
        refs.append(
            PageRef(
                key=page.key,
                parent=page.parent,
                first=first,
                num_tokens=page.num_tokens,
                num_used=step.num_used,
                path=root.joinpath(*page_names(namespace.digest, page.key)),
                nbytes=page.nbytes,
                namespace=namespace.digest,
                token_bytes=token_bytes,
                prefix_sha256=digest.copy().hexdigest(),
            )
        )
    return tuple(refs)


class Search:
    """One search for the longest stored prefix of one prompt."""

    def __init__(
        self, catalog: Catalog, namespace: Namespace, tokens: Tokens, page_tokens: int, start: Start
    ) -> None:
        self.catalog = catalog
        self.namespace = namespace.digest
        self.tokens = as_tokens(tokens)
        self.ordered = order_bytes(self.tokens)
        self.page_tokens = page_tokens
        self.start = start
        self.best: Trail | None = None

    def longest_trail(self) -> Trail | None:
        """Depth first: the way along full pages is nearly always the answer, the rest is for mixed page sizes."""
        places = self.walk(self.start.parent, None)
        while places and self.num_covered < len(self.tokens):
            for trail in self.look_around(places.pop()):
                places += self.walk(trail.page.key, trail)
        return self.best

    @property
    def num_covered(self) -> int:
        """Tokens covered by the best trail so far."""
        return self.best.num_tokens if self.best else self.start.first

    def walk(self, parent: bytes, trail: Trail | None) -> list[Place]:
        """Follow full pages as far as they go; returns the places where something else may lead on, last first."""
        places = []
        while True:
            first = trail.num_tokens if trail else self.start.first
            page = self.find_full_page(parent, first)
            num_others = (trail.page.num_children if trail else 2) - (page is not None)
            if num_others > 0:  # nobody counts the children of the root, so it always counts as a place
                places.append(Place(parent, trail, page.key if page else None))
            if page is None:
                break
            trail = self.extend(trail, page, page.num_tokens)
            parent = page.key
        self.consider(trail)
        return places

    def find_full_page(self, parent: bytes, first: int) -> StoredPage | None:
        """The stored page holding positions [first, first + page_tokens) of the prompt."""
        end = first + self.page_tokens
        if end > len(self.tokens):
            return None
        page = self.catalog.find_page(self.namespace, page_key(parent, self.tokens[first:end]))
        if page is None or (page.parent, page.tokens) != (parent, self.ordered[4 * first : 4 * end]):
            return None  # an equal digest of other tokens is not a match
        return page

    def look_around(self, place: Place) -> list[Trail]:
        """Consider the nearest child as the end of the trail; returns the children to walk on from."""
        first = place.trail.num_tokens if place.trail else self.start.first
        rest = self.ordered[4 * first :]
        nearest = self.catalog.nearest_child(self.namespace, place.parent, rest)
        if nearest is None or nearest[1] == 0:
            return []
        self.consider(self.extend(place.trail, *nearest))
        return [
            self.extend(place.trail, page, page.num_tokens)
            for page in self.catalog.prefix_children(self.namespace, place.parent, rest)
            if page.key != place.taken
        ]

    def extend(self, trail: Trail | None, page: StoredPage, num_used: int) -> Trail:
        """`trail` with one more page, of which `num_used` tokens match."""
        num_tokens, nbytes = (trail.num_tokens, trail.nbytes) if trail else (self.start.first, 0)
        return Trail(trail, page, num_used, num_tokens + num_used, nbytes + page.nbytes)

    def consider(self, trail: Trail | None) -> None:
        """Keep the trail if it covers more than the best one, or the same with fewer bytes."""
        if trail is not None and (
            self.best is None or (trail.num_tokens, -trail.nbytes) > (self.best.num_tokens, -self.best.nbytes)
        ):
            self.best = trail

    def diverges_behind(self, trail: Trail) -> bool:
        """Whether something is stored that continues the trail, but with another token than the prompt."""
        if trail.num_tokens == len(self.tokens):
            return False
        return trail.num_used < trail.page.num_tokens or trail.page.num_children > 0
