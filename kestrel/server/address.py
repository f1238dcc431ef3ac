"""Where the server listens: the socket, its address, and why it cannot be had."""

import errno
import socket

from kestrel.errors import KestrelError


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening yet: a taken port is noticed before a model is loaded.

    port: 0 lets the system choose. Raises KestrelError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a browser or client on this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> KestrelError:
    """What to raise when the system refuses the address."""
    if error.errno == errno.EADDRINUSE:
        return KestrelError(
            f"port {port} on {host} is in use; stop who listens there or choose another (server.port=…)"
        )
    return KestrelError(
        f"cannot listen on {host} port {port}: {error.strerror or error} (server.host, server.port)"
    )
