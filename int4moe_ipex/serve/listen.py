"""The server's socket, bound before a model is loaded or a library is imported that takes seconds."""

from __future__ import annotations

import socket

from int4moe_ipex.errors import ConfigError


def listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: the port is known to be free before a model is loaded.

    Raises:
        ConfigError: the address is no address of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"serve.host {host}: {error.strerror or error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"serve.host {host}, serve.port {port}: cannot listen there: {error.strerror}") from None
    return bound
