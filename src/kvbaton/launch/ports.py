"""Free TCP ports on one address."""

import socket
from collections.abc import Iterator

from kvbaton.base.errors import ConfigError


def is_free(host: str, port: int) -> bool:
    """Say whether a server could listen here now."""
    try:
        bound(host, port).close()
    except OSError:
        return False
    return True


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address the way a server binds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # A socket that is bound but does not listen would let a second one bind, too.
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def free_ports(host: str, count: int) -> Iterator[int]:
    """Yield distinct free ports, all held until the last is known so that none comes twice."""
    listeners = [bound(host, 0) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    yield from ports


def consecutive_ports(host: str, first: int, count: int) -> Iterator[int]:
    """Yield the ports from `first` on.

    Raises:
        ConfigError: one of them is taken or there are too few above it.
    """
    for port in range(first, first + count):
        if port > 65_535 or not is_free(host, port):
            raise ConfigError("engine_port", first, f"{count} free ports from there; {port} is not free")
        yield port


def router_port(host: str, wanted: int, is_default: bool) -> int:
    """Return the router's port: the wanted one, or a free one when that is 0 or only the default and taken.

    Raises:
        ConfigError: the port was asked for and is taken, or the address is not ours.
    """
    if wanted and is_free(host, wanted):
        return wanted
    if wanted and not is_default:
        raise ConfigError("port", wanted, f"a port that is free on {host}, or 0")
    try:
        return next(free_ports(host, 1))
    except OSError as error:
        raise ConfigError("host", host, f"an address of this machine ({error.strerror})") from error
