"""Marks: the `.dvc` file beside an artifact that makes its page part of the repository.

A mark is what git carries: DVC reads its `outs` (digest, size and name of the artifact), Kestrel its `meta`
(place in the tree of prefixes, and what computed it), so a clone without data knows every published page. Its
bytes are a pure function of the page and the name given to the prefix: boards that publish the same write the same.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kestrel.errors import ArtifactError
from kestrel.identity import canonical_json
from kestrel.store.artifact import parse_object, read_small

MARK_SUFFIX = ".safetensors.dvc"
MAX_MARK_NBYTES = 1 << 16
META_FORMAT = 1

PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LINE = re.compile(r"[ -]*(?P<name>\w+): *(?P<value>.*)")
_HEX = re.compile(r"[0-9a-f]{32}")
_COUNT = re.compile(r"[0-9]{1,15}")
_ARTIFACT = re.compile(r"[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class PublishedPage:
    """One published page, as its mark describes it; the artifact itself may be elsewhere."""

    path: Path  # where the artifact is, or belongs
    md5: str  # of the artifact, 32 hex digits: its name in DVC's cache and remotes
    nbytes: int  # of the artifact
    namespace: bytes  # full digest
    key: bytes
    parent: bytes
    first: int  # position of the page's first token
    num_tokens: int
    prefix: str | None  # the name of the prefix that ends with this page
    identity_text: str  # canonical JSON; hashes to the namespace

    @property
    def mark_path(self) -> Path:
        """The `.dvc` file."""
        return self.path.with_name(f"{self.path.name}.dvc")

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens from position 0 to the page's end."""
        return self.first + self.num_tokens

    @property
    def identity(self) -> dict[str, Any]:
        """What computed the page."""
        value: dict[str, Any] = json.loads(self.identity_text)
        return value

    @property
    def is_here(self) -> bool:
        """Whether the artifact is in the store, as far as its size tells."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_size == self.nbytes
        except FileNotFoundError:
            return False


def encode_mark(page: PublishedPage) -> bytes:
    """The mark of a page: YAML in the form DVC documents for `.dvc` files.

    `meta` is one text, as what DVC takes to read a mark grows with the number of its YAML tokens. Digests are quoted,
    as YAML would take some for numbers.
    """
    facts = {
        "first": page.first,
        "format": META_FORMAT,
        "identity": page.identity,
        "namespace": page.namespace.hex(),
        "num_tokens": page.num_tokens,
        "parent": page.parent.hex(),
        "prefix": page.prefix,
    }
    lines = [
        "outs:",
        f"- md5: '{page.md5}'",
        f"  size: {page.nbytes}",
        "  hash: md5",
        f"  path: {page.path.name}",
        "meta:",
        f"  kestrel: {_quoted(canonical_json(facts).decode('ascii'))}",
    ]
    return ("\n".join(lines) + "\n").encode("ascii")


def read_mark(path: Path) -> PublishedPage:
    """Read and check a mark. ArtifactError with the reason if it is not a page's, or does not fit its place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        text = read_small(fd, path, MAX_MARK_NBYTES)
        return _parse(path, text.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from error


def write_mark(page: PublishedPage) -> None:
    """Put a mark into place, whole or not at all, replacing one that is there. OSError."""
    folder = page.mark_path.parent
    temp = folder / f".kestrel-{secrets.token_hex(8)}.tmp"  # a name the store removes if we are killed here
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as file:
            file.write(encode_mark(page))
            file.flush()
            os.fsync(fd)
        os.replace(temp, page.mark_path)
    finally:
        temp.unlink(missing_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _parse(path: Path, text: str) -> PublishedPage:
    """The lines of a mark. Marks that DVC has written anew have the same lines, perhaps quoted otherwise."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None and match["value"]:
            if match["name"] in found:
                raise ArtifactError(f"{path}: {match['name']} occurs twice; was a merge left unresolved?")
            found[match["name"]] = _unquoted(match["value"])
    facts = parse_object(found.get("kestrel", ""), f"{path}: meta.kestrel")
    if facts.get("format") != META_FORMAT:
        raise ArtifactError(
            f"{path}: expected meta of format {META_FORMAT}, found {str(facts.get('format'))[:40]}"
        )
    identity = facts.get("identity")
    if not isinstance(identity, dict):
        raise ArtifactError(f"{path}: identity must be an object; publish it again")

    def take(name: str, form: re.Pattern[str], values: Mapping[str, Any] = found) -> str:
        value = values.get(name)
        if type(value) not in (str, int) or not form.fullmatch(str(value)):
            raise ArtifactError(
                f"{path}: {name} must match {form.pattern}, found {str(value)[:60]!r}; publish it again"
            )
        return str(value)

    name = take("path", _ARTIFACT)
    page = PublishedPage(
        path=path.with_name(name),
        md5=take("md5", _HEX),
        nbytes=int(take("size", _COUNT)),
        namespace=bytes.fromhex(take("namespace", _HEX, facts)),
        key=bytes.fromhex(name[:32]),
        parent=bytes.fromhex(take("parent", _HEX, facts)),
        first=int(take("first", _COUNT, facts)),
        num_tokens=int(take("num_tokens", _COUNT, facts)),
        prefix=take("prefix", PREFIX_NAME, facts) if facts.get("prefix") is not None else None,
        identity_text=_canonical(path, identity),
    )
    if path.name != f"{name}.dvc" or path.parent.name != name[:2]:
        raise ArtifactError(f"{path} describes {name}")
    if path.parent.parent.name != page.namespace.hex()[:16]:
        raise ArtifactError(f"{path} describes a page of namespace {page.namespace.hex()}")
    if (page.first == 0) != (page.parent == page.namespace) or page.num_tokens < 1:
        raise ArtifactError(f"{path}: a page at position {page.first} cannot have parent {page.parent.hex()}")
    if xxhash.xxh3_128_digest(page.identity_text.encode("ascii")) != page.namespace:
        raise ArtifactError(
            f"{path}: identity is not that of namespace {page.namespace.hex()}; publish it again"
        )
    return page


def _canonical(path: Path, identity: dict[str, Any]) -> str:
    try:
        return canonical_json(identity).decode("ascii")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: identity is not plain JSON: {error}") from error


def _quoted(text: str) -> str:
    """A YAML scalar in single quotes: taken literally, whatever it looks like."""
    return "'" + text.replace("'", "''") + "'"


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    return text
