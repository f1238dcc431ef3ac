"""Tool calls in an answer's text, as Qwen and Hermes models write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Riga"}}
</tool_call>
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCallReader:
    """Separates calls from text as an answer arrives. What is no valid call stays text, with its tags."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # not decided yet: the beginning of a tag, or an open call
        self._follows_call = False  # the line breaks after a call are no content

    def push(self, text: str) -> list[str | ToolCall]:
        """Take the next piece of text; return what is decided by now, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            at = self._held.find(OPEN)
            if at < 0:
                keep = _longest_overlap(self._held, OPEN)
                self._release(found, len(self._held) - keep)
                return found
            self._release(found, at)
            end = self._held.find(CLOSE)
            if end < 0:
                return found
            call = _parse(self._held[len(OPEN) : end])
            if call is None:
                self._release(found, end + len(CLOSE))
            else:
                self._held = self._held[end + len(CLOSE) :]
                self._add_call(found, call)

    def flush(self) -> list[str | ToolCall]:
        """The answer has ended: a call that only lacks its closing tag counts, anything else is text."""
        found: list[str | ToolCall] = []
        if self._held.startswith(OPEN):
            call = _parse(self._held[len(OPEN) :])
            if call is not None:
                self._held = ""
                self._add_call(found, call)
        self._release(found, len(self._held))
        return found

    def _release(self, found: list[str | ToolCall], end: int) -> None:
        text, self._held = self._held[:end], self._held[end:]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            found.append(text)

    def _add_call(self, found: list[str | ToolCall], call: ToolCall) -> None:
        self.num_calls += 1
        self._follows_call = True
        found.append(call)


def _longest_overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` are the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(arguments, str):  # some models write the object as text
            arguments = json.dumps(arguments, ensure_ascii=False)
        f"{name}{arguments}".encode()
    except (ValueError, RecursionError):  # no JSON, half of a surrogate pair, or endless brackets
        return None
    return ToolCall(name, arguments)


def split_answer(texts: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole answer."""
    reader = ToolCallReader()
    found = [item for text in texts for item in reader.push(text)] + reader.flush()
    content = "".join(item for item in found if isinstance(item, str))
    return content, [item for item in found if isinstance(item, ToolCall)]
