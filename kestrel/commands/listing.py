"""How stored pages, namespaces and the store's usage are shown, to people and as JSON."""

import time
from typing import TYPE_CHECKING, Any

from kestrel.commands.texts import age, count, size
from kestrel.config import CacheConfig
from kestrel.errors import ArtifactError

if TYPE_CHECKING:
    from kestrel.store.store import PageRow, Store, Usage

KEY_DIGITS = 12  # of a key, as shown; commands take any unique beginning
TEXT_LETTERS = 300  # of each end of a prefix, as shown
ROW_HEAD = ("KEY", "PREFIX", "PAGE", "SIZE", "USED", "HITS", "")


def row_cells(row: "PageRow") -> tuple[str, ...]:
    """One line of a list of pages: tokens from position 0 to the page's end, tokens of the page, size, use."""
    return (
        row.key.hex()[:KEY_DIGITS],
        str(row.first + row.num_tokens),
        str(row.num_tokens),
        size(row.nbytes),
        f"{age(time.time() - row.last_used)} ago",
        str(row.hits),
        "pinned" if row.pinned else "",
    )


def row_facts(row: "PageRow") -> dict[str, Any]:
    """A page as JSON: keys in hex, times in seconds since 1970."""
    return {
        "namespace": row.namespace.hex(),
        "key": row.key.hex(),
        "parent": row.parent.hex(),
        "first": row.first,
        "num_tokens": row.num_tokens,
        "nbytes": row.nbytes,
        "created": row.created,
        "last_used": row.last_used,
        "hits": row.hits,
        "pinned": row.pinned,
        "num_children": row.num_children,
    }


def usage_facts(usage: "Usage") -> dict[str, int]:
    """What the store takes, as JSON."""
    return {
        "bytes": usage.bytes,
        "files": usage.files,
        "tokens": usage.tokens,
        "strangers": usage.strangers,
        "stranger_bytes": usage.stranger_bytes,
        "quarantined": usage.quarantined,
        "quarantined_bytes": usage.quarantined_bytes,
        "catalog_bytes": usage.catalog_bytes,
    }


def usage_line(usage: "Usage", cache: CacheConfig) -> str:
    """What the store takes of what it may take, in one line."""
    parts = [
        f"{cache.root}: {size(usage.bytes)} of {size(cache.max_bytes)}",
        count(usage.files, "artifact") + ("" if cache.max_files is None else f" of {cache.max_files}"),
        count(usage.tokens, "token") + ("" if cache.max_tokens is None else f" of {cache.max_tokens}"),
    ]
    if usage.quarantined:
        parts.append(f"{count(usage.quarantined, 'quarantined file')} ({size(usage.quarantined_bytes)})")
    if usage.strangers:
        parts.append(f"{count(usage.strangers, 'foreign file')} ({size(usage.stranger_bytes)})")
    return ", ".join(parts)


def identity_line(store: "Store", namespace: bytes) -> str:
    """What a namespace's pages were computed with, as far as its identity.json says."""
    try:
        return describe_identity(store.load_identity(namespace))
    except ArtifactError as error:
        return f"({error})"


def describe_identity(identity: dict[str, Any]) -> str:
    """What pages were computed with, in one line."""
    try:
        model, weights = identity["model"], identity["weights"]
        return (
            f"{model['architecture']}, {model['num_layers']} layers x {model['hidden_size']}, "
            f"{weights['recipe']} weights {weights['digest'][:8]}, {identity['kv']['dtype']} KV, "
            f"numerics {identity['numerics']['probe'][:8]}"
        )
    except (KeyError, TypeError) as error:
        return f"(an identity of another form: {error!r})"


def shortened(text: str) -> str:
    """A text with its middle left out when it is long."""
    if len(text) <= 2 * TEXT_LETTERS:
        return text
    left_out = len(text) - 2 * TEXT_LETTERS
    return f"{text[:TEXT_LETTERS]}\n[… {left_out} characters …]\n{text[-TEXT_LETTERS:]}"
