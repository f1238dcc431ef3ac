"""The listening socket and uvicorn around it: start, and an orderly end on SIGTERM or SIGINT."""

import errno
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kestrel.errors import KestrelError
from kestrel.server.worker import EngineWorker

KEEP_ALIVE_SECONDS = 60  # an idle connection is kept this long
LAST_BYTES_SECONDS = 10  # at the end, how long a client may take to read what has been answered


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening yet: a taken port is noticed before a model is loaded.

    port: 0 lets the system choose. Raises KestrelError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a browser or client on this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _cannot_listen(host: str, port: int, error: OSError) -> KestrelError:
    if error.errno == errno.EADDRINUSE:
        return KestrelError(
            f"port {port} on {host} is in use; stop who listens there or choose another (server.port=…)"
        )
    return KestrelError(
        f"cannot listen on {host} port {port}: {error.strerror or error} (server.host, server.port)"
    )


class Listener(uvicorn.Server):
    """uvicorn, with Kestrel's way of stopping.

    The first signal refuses new and waiting requests with 503 while the running ones are finished; the second
    ends those between two tokens. Then the loop ends and `run` returns, whatever the signal was.
    """

    def __init__(self, app: FastAPI, worker: EngineWorker, log: Callable[[str], None], ready: str) -> None:
        """ready: the line to log once connections are accepted."""
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            )
        )
        self._worker = worker
        self._log = log
        self._ready = ready
        self._num_signals = 0
        self._num_signals_seen = 0

    def run_on(self, bound: socket.socket) -> None:
        """Listen on a bound socket until a signal comes. Raises KestrelError if the port is taken by now."""
        host, port = bound.getsockname()[:2]
        try:
            self.run(sockets=[bound])
        except OSError as error:
            self._worker.close()
            self._worker.join()
            raise _cannot_listen(host, port, error) from error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._log(self._ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal for `on_tick`: a handler may interrupt anything, also whoever holds a lock."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals > self._num_signals_seen:
            if not self._num_signals_seen:
                self._log("kestrel: stopping after the running requests; a second signal cuts them short")
                self._worker.close()
            if self._num_signals > 1:
                self._worker.cancel_running()
            self._num_signals_seen = self._num_signals
        if self._num_signals and self._worker.stopped:
            self.should_exit = True
        return await super().on_tick(counter)
