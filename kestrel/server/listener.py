"""uvicorn on a bound socket: start, and an orderly end on SIGTERM or SIGINT."""

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kestrel.server.address import cannot_listen
from kestrel.server.worker import EngineWorker

KEEP_ALIVE_SECONDS = 60  # an idle connection is kept this long
LAST_BYTES_SECONDS = 10  # at the end, how long a client may take to read what has been answered


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
            raise cannot_listen(host, port, error) from error

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
