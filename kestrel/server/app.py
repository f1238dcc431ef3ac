"""The application put together: the engine thread, the routes, and what machines ask."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Security
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from starlette.types import Message

import kestrel
from kestrel.config import Config
from kestrel.errors import ConfigError, KestrelError, StoreError
from kestrel.runtime import Runtime
from kestrel.server import wire
from kestrel.server.generating import generating_routes
from kestrel.server.intake import Intake
from kestrel.server.journal import Journal
from kestrel.server.keys import KeyWatch
from kestrel.server.kvroutes import kv_routes
from kestrel.server.metrics import CONTENT_TYPE as METRICS_TYPE
from kestrel.server.refusals import install_handlers
from kestrel.server.site import Site
from kestrel.server.warming import find_state, resolve_prefixes, warm_steps
from kestrel.server.worker import EngineWorker, QueueLimits

SWEEP_SECONDS = 20.0  # between two looks for what has expired
PAGE = Path(__file__).parent / "page.html"

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorAnswer, "description": description}
    for status, description in {
        400: "The request is invalid; `param` names the field.",
        401: "A valid API key is needed.",
        403: "The API key does not open this.",
        404: "No such model, or no such page.",
        413: "The prompt does not fit the context, or the body is too large.",
        429: "Too many requests; Retry-After says when to try again.",
        500: "The engine failed on this request; the server goes on.",
        503: "The server is shutting down, or the store cannot be used.",
    }.items()
}


def create_app(runtime: Runtime, config: Config, journal: Journal, keys: KeyWatch | None = None) -> FastAPI:
    """The application over an open runtime, left open at the end. Raises ConfigError for an unusable prefix.

    keys: who may use it; None for everybody. The engine thread runs for as long as the application's lifespan; it
    is `app.state.worker`.
    """
    keys = keys or KeyWatch(None)
    needs_key = not keys.current().is_empty
    server = config.server
    if server.max_running >= config.engine.chunk_tokens:
        raise ConfigError(
            f"server.max_running={server.max_running} must be less than "
            f"engine.chunk_tokens={config.engine.chunk_tokens}: a step computes a token of each answer, and some prompt"
        )
    prefixes = resolve_prefixes(config, runtime)
    runtime.share([prefix.tokens for prefix in prefixes])
    for prefix in prefixes:
        state = find_state(prefix, runtime)
        detail = f"ready ({state.num_tokens} tokens)" if state.state == "ready" else "absent"
        journal.line(f"prefix {prefix.name}: {detail}")
    to_warm = prefixes if server.warm and runtime.store is not None else []
    limits = QueueLimits(
        max_running=server.max_running,
        prompt_rows=server.prompt_rows,
        max_waiting=server.max_queue,
        max_waiting_nbytes=server.max_queue_bytes,
        max_per_key=server.max_running_per_key if needs_key else None,
    )
    worker = EngineWorker(runtime, limits, journal, warm_steps(to_warm, runtime, config, journal.line))
    site = Site(runtime, config, worker, prefixes, time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        tasks = [
            asyncio.create_task(_sweep_regularly(runtime, journal)),
            asyncio.create_task(_rehearse(app, site)),
        ]
        yield
        for task in tasks:
            task.cancel()
        worker.close()
        await asyncio.to_thread(worker.join)

    app = FastAPI(
        title="Kestrel",
        version=kestrel.__version__,
        lifespan=lifespan,
        responses=ERRORS,
        redoc_url=None,
        # Who may pass is decided in `Intake`, before a body is read; this is for the description of the API.
        dependencies=[Security(HTTPBearer(auto_error=False))] if needs_key else [],
    )
    app.state.worker = worker
    app.add_middleware(Intake, max_body_bytes=server.max_body_bytes, keys=keys, journal=journal)
    install_handlers(app, lambda: worker.retry_after_seconds)
    app.include_router(generating_routes(site))
    app.include_router(kv_routes(site))
    _add_status_routes(app, site)
    return app


async def _rehearse(app: FastAPI, site: Site) -> None:
    """Do once what the first request would wait for: routes are put together, the chat template is compiled.

    The time of a first request before the engine takes it: 29 to 43 -> 9 to 14 ms.
    """

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        pass

    await app(
        {"type": "http", "method": "GET", "path": "/ready", "query_string": b"", "headers": []}, receive, send
    )
    if site.runtime.chat is not None:
        with suppress(KestrelError):  # whoever needs the template learns of it
            hello = wire.ChatMessage(role="user", content="Hello")
            await site.tokens_of_chat(wire.TokenizeRequest(messages=[hello]))


async def _sweep_regularly(runtime: Runtime, journal: Journal) -> None:
    """Remove what has expired; saving a page only makes the room that it needs. A fault is logged once."""
    problem = None
    while runtime.store is not None:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            evictions = await asyncio.to_thread(runtime.store.sweep, in_vain=False)
            problem = None
            if evictions:
                nbytes = sum(eviction.nbytes for eviction in evictions)
                journal.event("sweep", files=len(evictions), bytes=nbytes)
        except StoreError as error:
            if str(error) != problem:
                journal.line(f"[KV-DISK] the store cannot be swept: {error}")
            problem = str(error)


def _add_status_routes(app: FastAPI, site: Site) -> None:
    """What machines ask every few seconds, and the page for people."""
    runtime, worker = site.runtime, site.worker

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", tags=["Kestrel"])
    async def ready(response: Response) -> wire.Ready:
        """Whether requests are taken (503 when not); for everybody."""
        if worker.closing:
            response.status_code = 503
        return wire.Ready(ready=not worker.closing)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["Kestrel"])
    def health(response: Response) -> wire.Health:
        """Whether requests are taken (503 when not), and what the server and the store hold."""
        if worker.closing:
            response.status_code = 503
        store, problem = None, None
        try:
            store = _store_counts(runtime, site.config.cache.root)
        except StoreError as error:
            problem = str(error)
        return wire.Health(
            status="shutting down" if worker.closing else "ok",
            model=runtime.name,
            namespace=runtime.namespace.name,
            uptime_seconds=round(time.time() - site.started_at, 3),
            queue=wire.QueueCounts(
                running=worker.num_running,
                places=worker.limits.max_running,
                waiting=worker.num_waiting,
                capacity=worker.limits.max_waiting,
            ),
            store=store,
            store_problem=problem,
        )

    @app.get("/metrics", tags=["Kestrel"], response_class=PlainTextResponse)
    def metrics() -> Response:
        """Counters and histograms for Prometheus (admin)."""
        text = worker.totals.expose(runtime, worker.num_running, worker.num_waiting)
        return PlainTextResponse(text, media_type=METRICS_TYPE)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html")


def _store_counts(runtime: Runtime, root: str) -> wire.StoreCounts | None:
    if runtime.store is None:
        return None
    counts = runtime.store.usage()
    return wire.StoreCounts(
        root=root,
        bytes=counts.bytes,
        files=counts.files,
        tokens=counts.tokens,
        strangers=counts.strangers,
        quarantined=counts.quarantined,
    )
