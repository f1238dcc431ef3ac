"""What happens to a request before any route sees it: who sends it, what it is called, how large it may be."""

import re
import secrets
import time

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.errors import KestrelError
from kestrel.server.journal import Journal
from kestrel.server.keys import ANYONE, Caller, KeyWatch, is_loopback
from kestrel.server.refusals import Forbidden, Unauthorized, error_response

DISCARDED_BYTES = (
    64 << 20
)  # of a refused body, at most this much is read so that the client gets to the answer
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # what a client may call its request

OPEN_PATHS = {"/", "/ready", "/docs", "/openapi.json"}  # for everybody; they tell nothing about anyone
ADMIN_PATHS = {"/metrics", "/v1/kv/pin", "/v1/kv/unpin"}
QUIET_PATHS = {"/health", "/ready", "/metrics"}  # asked every few seconds by machines: not logged


class BodyTooLarge(HTTPException):
    """A body is larger than `server.max_body_bytes` (HTTP 413)."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes (server.max_body_bytes)")


class Intake:
    """ASGI middleware around everything.

    Sets `scope["arrived"]` (seconds of time.perf_counter), `scope["request_id"]` and `scope["caller"]`. Refuses who
    has no key before reading the body, and bodies above a limit: one that says it is larger is refused unread, one
    that does not say once it is. No more than the limit is ever held in memory. Logs every answer's status.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, keys: KeyWatch, journal: Journal) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._journal = journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["arrived"] = time.perf_counter()
        wanted = headers.get("x-request-id", "")
        scope["request_id"] = wanted if REQUEST_ID.fullmatch(wanted) else f"req-{secrets.token_hex(8)}"
        send = self._noting(scope, send)
        refusal = self._admit(scope, headers)
        if refusal is not None:
            await _discard_rest({"type": "http.request", "more_body": True}, receive)
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, self._bounded(headers, receive), send)

    def _admit(self, scope: Scope, headers: Headers) -> KestrelError | None:
        """Find out who is calling; the reason if they may not."""
        path, caller = scope["path"], ANYONE
        keys = self._keys.current()
        if keys.is_empty:
            # A web page elsewhere could have its name point to this machine (DNS rebinding) and use the server.
            if not is_loopback(_host_name(headers.get("host", "localhost"))):
                return Forbidden("this server has no API keys and answers on the loopback address only")
        elif path not in OPEN_PATHS:
            found = keys.find_caller(headers.get("authorization"))
            if found is None:
                return Unauthorized("a valid API key is needed; send it as `Authorization: Bearer KEY`")
            caller = found
        scope["caller"] = caller
        if not caller.is_admin and _needs_admin(scope["method"], path):
            return Forbidden(f"{scope['method']} {path} needs an admin's API key")
        return None

    def _noting(self, scope: Scope, send: Send) -> Send:
        """`send`, which also puts the request's id into the answer and logs the status."""

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("X-Request-Id", scope["request_id"])
                if scope["path"] not in QUIET_PATHS:
                    caller: Caller = scope.get("caller", ANYONE)
                    self._journal.event(
                        "request",
                        id=scope["request_id"],
                        key=caller.name,
                        method=scope["method"],
                        path=scope["path"],
                        status=message["status"],
                        ms=round((time.perf_counter() - scope["arrived"]) * 1e3),
                    )
            await send(message)

        return send_noted

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """`receive`, which refuses a body that is too large."""
        declared = headers.get("content-length", "0")
        too_large = declared.isdecimal() and int(declared) > self._max_body_bytes
        size = 0

        async def receive_bounded() -> Message:
            nonlocal size, too_large
            message: Message = {"type": "http.request", "more_body": True} if too_large else await receive()
            size += len(message.get("body", b""))
            too_large = too_large or size > self._max_body_bytes
            if too_large:
                await _discard_rest(message, receive)
                raise BodyTooLarge(self._max_body_bytes)
            return message

        return receive_bounded


def _needs_admin(method: str, path: str) -> bool:
    return path in ADMIN_PATHS or (method == "DELETE" and path.startswith("/v1/kv/"))


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]


async def _discard_rest(message: Message, receive: Receive) -> None:
    """Read what a client still sends: closing the connection on unread data would take the answer with it."""
    discarded = 0
    while message["type"] == "http.request" and message.get("more_body") and discarded < DISCARDED_BYTES:
        message = await receive()
        discarded += len(message.get("body", b""))
