"""Resolve: host names to addresses without blocking the courier."""

import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """What a socket connects to."""

    family: int
    address: tuple[str | int | bytes, ...]


def resolve(host: str, port: int, done: Callable[[SocketAddress | OSError], None]) -> None:
    """Find an address; `done` is called at once for literal addresses, otherwise later from a short-lived thread."""
    literal = _literal(host, port)
    if literal is not None:
        done(literal)
        return

    def work() -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            done(error if isinstance(error, OSError) else OSError(f"{host!r} is not a host name"))
            return
        done(SocketAddress(family, address))

    threading.Thread(target=work, name="kvbaton-resolve", daemon=True).start()


def _literal(host: str, port: int) -> SocketAddress | None:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return SocketAddress(socket.AF_INET if version == 4 else socket.AF_INET6, (host, port))
