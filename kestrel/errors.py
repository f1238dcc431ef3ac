"""Every error Kestrel raises on purpose. Messages say what was expected, what was found and what to do."""


class KestrelError(Exception):
    """Base of all expected failures; the command line prints it without a traceback and exits 1."""


class ConfigError(KestrelError):
    """The configuration is wrong; the message names the key and lists what exists."""


class ModelError(KestrelError):
    """A checkpoint is missing, damaged or of a kind Kestrel does not run."""


class TemplateError(KestrelError):
    """A chat template failed on these messages."""


class PromptTooLong(KestrelError):
    """A prompt does not fit the context window (HTTP 413)."""


class RequestError(KestrelError):
    """A request asks for something invalid or unsupported (HTTP 400)."""


class CapacityError(KestrelError):
    """The page pool or the request queue is full (HTTP 429)."""


class ArtifactError(KestrelError):
    """An artifact is missing, damaged or not the one expected; never fails a request."""


class StoreError(KestrelError):
    """The store as a whole cannot be used (unreadable root, full disk…); never fails a request."""


class SharingError(KestrelError):
    """DVC, its cache or a remote failed; never fails a request."""
