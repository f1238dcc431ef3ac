"""Opening the configured model for a command, with its progress."""

from kestrel.commands.progress import Working
from kestrel.commands.texts import ignore_line
from kestrel.config import Config
from kestrel.log import log_to_stderr
from kestrel.runtime import Runtime


def open_runtime(config: Config, quiet: bool) -> Runtime:
    """Load the model and open the store; the first time the model is fetched and converted. Close it after use.

    quiet: log nothing and show no progress.
    """
    if quiet:
        return Runtime.open(config, ignore_line)
    with Working("loading the model") as working:
        return Runtime.open(
            config,
            log_to_stderr,
            lambda done, total: working.report(done, total, "converting the weights"),
        )
