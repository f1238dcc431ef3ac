"""The words of a command line that are no options: Hydra overrides (`key=value`) and operands (all others)."""

import re
from collections.abc import Sequence

from kestrel.config import GROUPS

_OVERRIDE = re.compile(r"(\+{1,2})?(?P<group>[A-Za-z_]\w*)[\w./@-]*=", re.ASCII)
_REMOVAL = re.compile(r"~[A-Za-z_][\w.]*", re.ASCII)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (overrides, operands), each in the order given.

    A word is an override when it begins like one of a known group (`server.port=`, `cache=`), or has the form
    `key=value` without any white space (so that a mistyped key is reported and not taken for a prompt).
    """
    overrides: list[str] = []
    operands: list[str] = []
    for word in words:
        match = _OVERRIDE.match(word)
        known = match is not None and match["group"] in GROUPS
        compact = match is not None and not re.search(r"\s", word)
        (overrides if known or compact or _REMOVAL.fullmatch(word) else operands).append(word)
    return overrides, operands
