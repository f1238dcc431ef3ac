"""Whose pages a request finds and adds.

Everything belongs to the common scope unless a request names another one, such as a tenant's. Another scope has a
namespace of its own (its identity holds one entry more), so its pages lie in a folder of their own, under keys that
nobody else can arrive at, in memory as on disk. What it has in common with everybody are the shared prefixes: of a
prompt that begins with one, the full pages inside it belong to the common scope, and the scope's own pages follow
behind them, under a key made of the last common one and the scope's namespace (`identity.branch_key`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.engine.pool import common_prefix
from kestrel.identity import Namespace, Tokens, branch_key, page_key


@dataclass(frozen=True)
class Scope:
    """A namespace and the identity it is the digest of."""

    namespace: Namespace
    identity: Mapping[str, Any]

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> "Scope":
        """The scope of an identity."""
        return cls(Namespace.of(identity), identity)


@dataclass(frozen=True)
class Course:
    """Which scope each page of one prompt belongs to: the common one up to a point, `own` from there on."""

    common: Scope
    own: Scope
    num_shared: int  # tokens of the shared prefix the prompt begins with; 0 when there is none
    num_common_pages: int  # full pages inside it

    @classmethod
    def of(
        cls, common: Scope, own: Scope, shared: Sequence[Tokens], tokens: Tokens, page_tokens: int
    ) -> "Course":
        """The course of a prompt; `shared` are the prefixes that all scopes have in common."""
        if own.namespace == common.namespace:
            return cls(common, own, 0, 0)
        lengths = [len(prefix) for prefix in shared if common_prefix(prefix, tokens) == len(prefix)]
        num_shared = max(lengths, default=0)
        return cls(common, own, num_shared, num_shared // page_tokens)

    def scope_of(self, index: int) -> Scope:
        """The scope of page `index` of the prompt."""
        return self.common if index < self.num_common_pages else self.own

    def parent_of(self, index: int, keys: Sequence[bytes]) -> bytes:
        """What page `index` names as its parent; `keys` are those of the pages before it."""
        if index and index == self.num_common_pages:
            return branch_key(keys[index - 1], self.own.namespace)
        return keys[index - 1] if index else self.scope_of(0).namespace.digest

    def keys(self, tokens: Tokens, page_tokens: int) -> list[bytes]:
        """Keys of the common pages of a prompt."""
        keys: list[bytes] = []
        for index in range(self.num_common_pages):
            page = tokens[index * page_tokens : (index + 1) * page_tokens]
            keys.append(page_key(self.parent_of(index, keys), page))
        return keys
