"""The configured prefixes in a running server: which are stored, and building those that are not."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kestrel.config import Config
from kestrel.errors import ConfigError, KestrelError
from kestrel.prefixes import prefix_tokens
from kestrel.runtime import Request, Runtime
from kestrel.server import wire

FETCH_POLL_SECONDS = 0.005  # between two looks at whether published pages have arrived


@dataclass(frozen=True)
class NamedPrefix:
    """A prefix of the configuration and the token ids it stands for."""

    name: str
    tokens: list[int]


def resolve_prefixes(config: Config, runtime: Runtime) -> list[NamedPrefix]:
    """Tokenize the configured prefixes. Raises ConfigError for one that cannot be read or does not fit."""
    prefixes = []
    for name, prefix in config.prefixes.items():
        tokens = prefix_tokens(name, prefix, runtime.tokenizer, runtime.chat)
        if len(tokens) >= runtime.context_tokens:
            raise ConfigError(
                f"prefixes.{name}: {len(tokens)} tokens leave no room in the context of "
                f"{runtime.context_tokens}; shorten it or raise model.context_tokens"
            )
        prefixes.append(NamedPrefix(name, tokens))
    return prefixes


def find_state(prefix: NamedPrefix, runtime: Runtime) -> wire.PrefixState:
    """How much of a prefix is stored now. May be called from any thread."""
    followed = [*prefix.tokens, prefix.tokens[-1]]  # the last token of a prompt is never looked up
    stored = runtime.find(followed).num_tokens
    return wire.PrefixState(
        name=prefix.name,
        state="ready" if stored == len(prefix.tokens) else "absent",
        num_tokens=len(prefix.tokens),
        stored_tokens=stored,
    )


def warm_steps(
    prefixes: Sequence[NamedPrefix], runtime: Runtime, config: Config, log: Callable[[str], None]
) -> Iterator[None]:
    """Compute and save the prefixes that are not stored, a chunk a step: requests wait for one chunk at most.

    A step ends where a page does: later steps continue from whole pages, which are saved once.
    """
    page = config.cache.page_tokens
    step = max(1, config.engine.chunk_tokens // page) * page
    for prefix in prefixes:
        if find_state(prefix, runtime).state == "ready":
            continue
        try:
            fetch = runtime.fetch(Request(prefix.tokens, 1))
            while not fetch.is_over:
                time.sleep(FETCH_POLL_SECONDS)
                yield
            for end in range(step, len(prefix.tokens), step):
                runtime.prefill(prefix.tokens[:end], fetch)
                yield
            runtime.prefill(prefix.tokens, fetch)
            log(f"prefix {prefix.name}: ready ({len(prefix.tokens)} tokens)")
        except KestrelError as error:
            log(f"prefix {prefix.name}: not built: {error}")
        yield
