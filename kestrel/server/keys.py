"""API keys: who is calling, and what they may do.

Every key belongs to a name, and a name is a tenant: what its requests compute is found by nobody else. Several keys
may share a name, so that a key can be replaced without losing what is stored. The file they are in is read again
when it changes: keys come and go without a restart.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kestrel.errors import ConfigError

ENVIRONMENT = "KESTREL_API_KEYS"
LOOK_SECONDS = 1.0  # between two looks at the key file
LEAST_KEY_LENGTH = 16  # characters; `openssl rand -hex 24` makes 48
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = re.compile(r"[!-9;-~]+")  # printable ASCII without space and colon


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `tenant` None: there are no keys, everybody shares everything."""

    name: str
    tenant: str | None
    is_admin: bool


ANYONE = Caller("", None, True)


@dataclass(frozen=True)
class ApiKey:
    """A key, of which only the SHA-256 is kept."""

    name: str
    digest: bytes = field(repr=False)
    is_admin: bool = False


class Keyring:
    """The keys that are valid. An empty one lets everybody in."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def is_empty(self) -> bool:
        """Whether no key is needed."""
        return not self._keys

    @property
    def names(self) -> list[str]:
        """The tenants."""
        return sorted({key.name for key in self._keys})

    @property
    def has_admin(self) -> bool:
        """Whether any key opens the admin routes."""
        return any(key.is_admin for key in self._keys)

    def find_caller(self, authorization: str | None) -> Caller | None:
        """The owner of the key in an Authorization header (`Bearer KEY`); None if it is not a valid one.

        Takes the same time whichever key it is, and however much of it is right.
        """
        if self.is_empty:
            return ANYONE
        kind, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found: ApiKey | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None or kind.lower() != "bearer":
            return None
        return Caller(found.name, found.name, found.is_admin)


def load_keys(file: str | None) -> Keyring:
    """The keys of a file and of the environment together. ConfigError that never quotes a key."""
    keys: list[ApiKey] = []
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.api_keys_file: cannot read {file}: {error}") from error
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_parse(line.strip(), f"{file}, line {number}"))
        if not keys:
            raise ConfigError(
                f"server.api_keys_file: {file} holds no key; lines are NAME:KEY or NAME:KEY:admin"
            )
    for number, entry in enumerate(os.environ.get(ENVIRONMENT, "").replace(",", " ").split(), 1):
        keys.append(_parse(entry, f"{ENVIRONMENT}, entry {number}"))
    seen: set[bytes] = set()
    for key in keys:
        if key.digest in seen:
            raise ConfigError(f"a key of {key.name} occurs twice among the API keys; every key has one owner")
        seen.add(key.digest)
    return Keyring(keys)


class KeyWatch:
    """The keys that are valid at this moment, as their file changes. For one thread.

    A file that is missing, or holds anything but keys, changes nothing: the keys read before stay valid.
    """

    def __init__(
        self,
        file: str | None,
        changed: Callable[[Keyring], None] = lambda ring: None,
        failed: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """Read the keys of the file and of the environment, as `load_keys` does; ConfigError.

        changed: called with the new keys each time they were read again; failed: once for each time they cannot be.
        """
        self._file, self._changed, self._failed = file, changed, failed
        self._stamp = _stamp(file)  # before reading: what is written meanwhile is another one
        self._ring = load_keys(file)
        self._looked = time.monotonic()

    def current(self) -> Keyring:
        """The keys; looks at the file if that was a second ago."""
        now = time.monotonic()
        if self._file is not None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
        return self._ring

    def _read_again(self) -> None:
        try:
            self._ring = load_keys(self._file)
        except ConfigError as error:
            self._failed(str(error))
        else:
            self._changed(self._ring)


def _stamp(file: str | None) -> tuple[int, ...] | None:
    """What differs between two versions of a file; None if there is none."""
    try:
        status = os.stat(file) if file is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def is_readable_by_others(file: str) -> bool:
    """Whether the permissions of a key file let other users read it."""
    return bool(os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _parse(entry: str, place: str) -> ApiKey:
    name, *rest = entry.split(":")
    if not rest or len(rest) > 2 or (len(rest) == 2 and rest[1] != "admin"):
        raise ConfigError(f"{place}: expected NAME:KEY or NAME:KEY:admin")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{place}: expected a name of letters, digits, dots, - and _, at most 64 of them")
    key = rest[0]
    if len(key) < LEAST_KEY_LENGTH or not KEY.fullmatch(key):
        raise ConfigError(
            f"{place}: expected a key of at least {LEAST_KEY_LENGTH} printable ASCII characters without "
            f"spaces, commas and colons, found one of {len(key)}; `openssl rand -hex 24` makes a good one"
        )
    return ApiKey(name, hashlib.sha256(key.encode()).digest(), len(rest) == 2)


def check_address(host: str, keys: Keyring) -> None:
    """Refuse to listen where other machines reach the server, unless keys are needed. Raises ConfigError."""
    if keys.is_empty and not is_loopback(host):
        raise ConfigError(
            f"server.host={host} can be reached from other machines, and there are no API keys; set "
            f"server.api_keys_file or {ENVIRONMENT}, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether an address (or localhost) is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, whatever it resolves to
        return False
