"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, code, param}}."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kestrel.errors import (
    CapacityError,
    KestrelError,
    PromptTooLong,
    RequestError,
    StoreError,
    TemplateError,
)
from kestrel.server import wire
from kestrel.server.worker import EngineFailure, ShuttingDown

MOST_DESCRIBED = 10  # faults of one body


class UnknownModel(KestrelError):
    """A request names a model that is not served (HTTP 404)."""


class UnknownPage(KestrelError):
    """A request names a page that the caller has not got (HTTP 404)."""


class Unauthorized(KestrelError):
    """A request comes without a valid API key (HTTP 401)."""


class Forbidden(KestrelError):
    """A request comes from someone who may not do this (HTTP 403)."""


# Status, type, code and param of an error; the first class that fits counts.
KINDS: dict[type[Exception], tuple[int, str, str, str | None]] = {
    UnknownModel: (404, "invalid_request_error", "model_not_found", "model"),
    UnknownPage: (404, "invalid_request_error", "page_not_found", "key"),
    Unauthorized: (401, "authentication_error", "invalid_api_key", None),
    Forbidden: (403, "permission_error", "forbidden", None),
    PromptTooLong: (413, "invalid_request_error", "context_length_exceeded", None),
    RequestError: (400, "invalid_request_error", "invalid_request", None),
    TemplateError: (400, "invalid_request_error", "chat_template_failed", "messages"),
    CapacityError: (429, "rate_limit_error", "capacity_exceeded", None),
    ShuttingDown: (503, "unavailable_error", "shutting_down", None),
    StoreError: (503, "unavailable_error", "store_unavailable", None),
    EngineFailure: (500, "server_error", "engine_failure", None),
    Exception: (500, "server_error", "internal_error", None),
}


def describe(error: Exception) -> tuple[int, wire.ErrorAnswer]:
    """Status and body for an error raised while a request was handled."""
    status, kind, code, param = next(kind for cls, kind in KINDS.items() if isinstance(error, cls))
    expected = isinstance(error, KestrelError)
    message = str(error) if expected else "internal error; the server's log says why"
    return status, _body(message, kind, code, param)


def error_response(error: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer to a request that ended with this error."""
    status, body = describe(error)
    if status == 401:
        headers = {**(headers or {}), "WWW-Authenticate": "Bearer"}
    return JSONResponse(body.model_dump(), status, headers)


def install_handlers(app: FastAPI, retry_after: Callable[[], int]) -> None:
    """Answer every error of `app` in OpenAI's shape. `retry_after()`: seconds to wait after a 429."""

    @app.exception_handler(KestrelError)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> JSONResponse:
        status, _ = describe(error)
        return error_response(error, {"Retry-After": str(retry_after())} if status == 429 else None)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_describe_invalid(error.errors()).model_dump(), 400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = error.status_code
        path = request.url.path
        message, code = {
            404: (f"there is no {path} here; GET /docs lists what there is", "not_found"),
            405: (
                f"{request.method} is not possible on {path}; GET /docs lists what is",
                "method_not_allowed",
            ),
            413: (str(error.detail), "body_too_large"),
        }.get(status, (str(error.detail), "invalid_request"))
        return JSONResponse(_body(message, "invalid_request_error", code).model_dump(), status, error.headers)


def _describe_invalid(errors: Sequence[Any]) -> wire.ErrorAnswer:
    """One message for what is wrong with a body; `param` and `code` speak of the first."""
    found = [(*_field_and_message(error), error["type"]) for error in errors[:MOST_DESCRIBED]]
    param, _, kind = found[0]
    message = "; ".join(text if not name or name in text else f"{name}: {text}" for name, text, _ in found)
    if len(errors) > len(found):
        message += f"; and {len(errors) - len(found):,} more"
    code = {"json_invalid": "invalid_json", "missing": "missing_field", "extra_forbidden": "unknown_field"}
    code["unsupported"] = "unsupported_field"
    return _body(message, "invalid_request_error", code.get(kind, "invalid_value"), param or None)


def _field_and_message(error: Any) -> tuple[str, str]:
    """A field's name as it would be written in code (`messages[0].content`), and what is wrong with it."""
    place = error["loc"][1:]  # without "body"
    kind = error["type"]
    if kind == "json_invalid":
        return "", f"the body is not JSON: {error['ctx']['error']} at character {place[0] if place else 0}"
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if not name and kind in ("model_attributes_type", "dict_type", "missing"):
        return "", "the body must be a JSON object, sent with Content-Type: application/json"
    if kind == "extra_forbidden":
        return (
            name,
            f"{name} is not a field Kestrel knows, and ignoring it might change the answer; leave it out",
        )
    if kind == "missing":
        return name, f"{name} is missing"
    message = str(error["msg"])
    return name, message[:1].lower() + message[1:] if message.startswith("Input") else message


def _body(message: str, kind: str, code: str, param: str | None = None) -> wire.ErrorAnswer:
    """An error body. Messages quote what was sent, so what UTF-8 cannot hold is escaped."""
    return wire.ErrorAnswer(
        error=wire.ErrorDetail(
            message=_encodable(message), type=kind, code=code, param=param and _encodable(param)
        )
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
