"""Preparing a named prefix: the pages of the store that hold exactly its tokens, computed where they are missing."""

from dataclasses import dataclass

from kestrel.config import PrefixConfig
from kestrel.errors import StoreError
from kestrel.identity import as_tokens, prefix_sha256
from kestrel.prefixes import prefix_tokens
from kestrel.runtime import Runtime
from kestrel.sharing.cutting import save_cut


@dataclass(frozen=True)
class PreparedPrefix:
    """A prefix that is in the store."""

    name: str
    keys: list[bytes]  # of its pages, in order; the last one ends where the prefix ends
    num_tokens: int
    nbytes: int  # of its artifacts
    num_computed: int  # tokens that had to be computed for it now


def prepare(runtime: Runtime, name: str, prefix: PrefixConfig) -> PreparedPrefix:
    """Make sure that a prefix is stored, and return its pages. Computes only what neither store nor remote has.

    Where its end lies inside a longer page (a session has gone on from it), it gets a last page of its own, cut from
    that one. Can be killed and run again: whole pages that were saved are not computed again. Raises ConfigError,
    TemplateError, or StoreError when the store cannot keep it.
    """
    if runtime.store is None or runtime.writer is None:
        raise StoreError("the store is switched off (cache.enabled=false); prefixes are kept in it")
    tokens = prefix_tokens(name, prefix, runtime.tokenizer, runtime.chat)
    followed = [*tokens, tokens[-1]]  # the last token of a prompt is never looked up
    num_computed = 0
    if runtime.find(followed).num_tokens < len(tokens):
        # Whole steps, so that what is saved before a kill is a beginning of the prefix.
        step = max(1, runtime.config.engine.chunk_tokens // runtime.config.cache.page_tokens)
        step *= runtime.config.cache.page_tokens
        for end in [*range(step, len(tokens), step), len(tokens)]:
            num_computed += runtime.prefill(tokens[:end]).computed_tokens
        runtime.writer.drain()
    match = runtime.find(followed)
    if match.num_tokens < len(tokens):
        raise StoreError(
            f"prefix {name} has {len(tokens)} tokens, the store keeps {match.num_tokens} of them: "
            f"{match.reason or 'look at its limits (cache.max_bytes, cache.max_prefix_tokens)'}"
        )
    keys = [ref.key for ref in match.pages]
    nbytes = [ref.nbytes for ref in match.pages]
    last = match.pages[-1]
    if last.num_used < last.num_tokens:
        layout = runtime.engine.pool.layout
        keys[-1] = save_cut(runtime.store, last, layout, prefix_sha256(as_tokens(tokens)))
        row = runtime.store.find_row(keys[-1])
        nbytes[-1] = row.nbytes if row is not None else 0
    return PreparedPrefix(name, keys, len(tokens), sum(nbytes), num_computed)
