"""The server from its start to its end: keys, address, model, application, and what is saved at last."""

import gc
import time
from collections.abc import Callable
from importlib import import_module
from threading import Thread

from kestrel.config import Config
from kestrel.log import Log, log_to_stderr
from kestrel.runtime import Runtime
from kestrel.server.address import bind, url_of
from kestrel.server.journal import Journal
from kestrel.server.keys import ENVIRONMENT, Keyring, KeyWatch, check_address, is_readable_by_others

PROGRESS_SECONDS = 5.0  # between two lines about long work


def serve(config: Config, log: Log = log_to_stderr) -> None:
    """Load the model and serve until SIGTERM or SIGINT; then finish what runs, save, and return.

    Raises KestrelError for a taken port or an unusable model, ConfigError for an address that needs API keys.
    """
    journal = Journal(log, config.server.log_format)
    keys = KeyWatch(
        config.server.api_keys_file,
        changed=lambda ring: _say_who_may_enter(ring, config, journal),
        failed=lambda problem: journal.line(f"kestrel: the API keys stay as they are: {problem}"),
    )
    check_address(config.server.host, keys.current())
    _say_who_may_enter(keys.current(), config, journal)
    bound = bind(config.server.host, config.server.port)
    gc.disable()  # what is made on the way stays: searching it for garbage took 5 % of a start
    # Packing the weights leaves the interpreter free for a while: long enough for the web framework.
    Thread(target=import_module, args=("kestrel.server.app",), daemon=True).start()
    try:
        runtime = Runtime.open(config, journal.line, _conversion_log(journal.line))
        try:
            from kestrel.server.app import create_app
            from kestrel.server.listener import Listener

            app = create_app(runtime, config, journal, keys)
            gc.freeze()
            gc.enable()
            ready = f"kestrel: listening on {url_of(bound)} (model {runtime.name})"
            if runtime.store_problem is not None:
                ready += f"; nothing is stored or restored until the store works: {runtime.store_problem}"
            Listener(app, app.state.worker, journal.line, ready).run_on(bound)
            journal.line("kestrel: saving what was computed …")
        finally:
            runtime.close()
        journal.line("kestrel: stopped")
    finally:
        gc.enable()  # also where it did not come to listening
        bound.close()


def _say_who_may_enter(keys: Keyring, config: Config, journal: Journal) -> None:
    """Log whose keys are valid, and what is not as it should be about them."""
    if keys.is_empty:
        return
    journal.line(f"kestrel: API keys of {', '.join(keys.names)}")
    if not keys.has_admin:
        journal.line(
            "kestrel: no key is an admin's, so /metrics, pinning and deleting are closed; "
            f"write NAME:KEY:admin in server.api_keys_file or {ENVIRONMENT}"
        )
    file = config.server.api_keys_file
    if file is not None and is_readable_by_others(file):
        journal.line(f"kestrel: {file} can be read by other users; run chmod 600 {file}")


def _conversion_log(log: Log) -> Callable[[int, int], None]:
    """What to call with (done, total) while weights are converted: logs the share every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            log(f"[MODEL] converting: {100 * done // total}%")

    return report
