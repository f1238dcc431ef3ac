"""Promise: an event is one line, for people or for programs, whatever a client puts into it."""

import json

from kestrel.server.journal import Journal


def lines(form: str) -> list[str]:
    log: list[str] = []
    journal = Journal(log.append, form)
    journal.line("[KV-DISK] index: 1 checkpoint(s) in artifacts/kv")
    journal.event("request", id="req-1", key="", path='/v1/"x\ny=z', status=200, reason=None)
    return log


def test_text() -> None:
    assert lines("text") == [
        "[KV-DISK] index: 1 checkpoint(s) in artifacts/kv",
        r'kestrel: request id=req-1 path="/v1/\"x\ny=z" status=200',
    ]


def test_json() -> None:
    first, second = map(json.loads, lines("json"))
    assert first.pop("time").endswith("Z") and second.pop("time")[10] == "T"
    assert first == {"event": "log", "message": "[KV-DISK] index: 1 checkpoint(s) in artifacts/kv"}
    assert second == {
        "event": "request",
        "id": "req-1",
        "key": "",
        "path": '/v1/"x\ny=z',
        "status": 200,
        "reason": None,
    }
