"""The server's log: one line an event, for people as key=value or for programs as JSON."""

import json
import time
from collections.abc import Callable

Value = str | int | float | bool | None


class Journal:
    """Writes log lines through `write`, each one whole. Thread-safe if `write` is."""

    def __init__(self, write: Callable[[str], None], form: str = "text") -> None:
        """form: "text" or "json"."""
        self._write = write
        self._json = form == "json"

    def line(self, text: str) -> None:
        """A line of free text. As JSON it is the `message` of an event named "log"."""
        if self._json:
            self._write(_as_json("log", {"message": text}))
        else:
            self._write(text)

    def event(self, name: str, **facts: Value) -> None:
        """Something that happened: `kestrel: NAME key=value …`, or an object with `time` and `event`.

        Facts that are None or empty are left out of the text.
        """
        if self._json:
            self._write(_as_json(name, facts))
            return
        words = [f"{key}={_as_word(value)}" for key, value in facts.items() if value not in (None, "")]
        self._write(" ".join([f"kestrel: {name}", *words]))


def _as_json(name: str, facts: dict[str, Value]) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() // 1_000_000 % 1000:03d}Z"
    return json.dumps({"time": stamp, "event": name, **facts}, ensure_ascii=False)


def _as_word(value: Value) -> str:
    """A value without line breaks, quoted where it holds spaces: a line stays one line whatever a client sends."""
    text = str(value)
    return text if text.isprintable() and not set(' "=') & set(text) else json.dumps(text)
