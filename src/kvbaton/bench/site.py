"""Site: where contenders are put and what joins their engines, loopback or a pair of network namespaces."""

import contextlib
import os
import socket
from typing import Protocol

from kvbaton.base.errors import KvbatonError
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.engines import Places, places_in, places_on_loopback
from kvbaton.bench.namespaces import Names, Namespaces, NoNamespaces
from kvbaton.workload.cells import Link


class Site(Protocol):
    """Where contenders are put and what joins their engines."""

    topology: str

    def places(self) -> Places:
        """Addresses and ports for one contender."""
        ...

    def shape(self, link: Link) -> None:
        """Limit what joins the engines."""
        ...


class Loopback:
    """This machine's loopback: as fast as it goes, new ports for each contender."""

    def __init__(self, topology: str = "loopback") -> None:
        self.topology = topology

    def places(self) -> Places:
        """Five free ports."""
        first, second, third, fourth, fifth = free_ports(5)
        return places_on_loopback((first, second, third, fourth, fifth))

    def shape(self, link: Link) -> None:
        """Accept the unlimited link only."""
        if link.bits_per_s is not None:
            raise KvbatonError("loopback cannot be limited")


class Apart:
    """A pair of network namespaces with a link of known rate between."""

    topology = "namespaces"

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def places(self) -> Places:
        """Always the same, since nobody else is there."""
        return places_in(self._namespaces.names)

    def shape(self, link: Link) -> None:
        """Set the rate in both directions."""
        self._namespaces.shape(link)


def enter_site(config: BenchConfig, stack: contextlib.ExitStack) -> tuple[Site, str | None]:
    """Make what the links need, to be removed with the stack; without the means, fall back to loopback and say why."""
    if config.attached:
        return Loopback("remote"), None
    if not config.wants_namespaces:
        return Loopback(), None
    try:
        return Apart(stack.enter_context(Namespaces(Names.of(os.getpid())))), None
    except NoNamespaces as error:
        return Loopback(), f"no limited links here, measuring on loopback only: {error}"


def free_ports(count: int) -> list[int]:
    """Distinct free ports, all held until the last is known so that none comes twice."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]
