"""Links: all connections of one courier, from a stranger's first byte to a dead peer's burial."""

import logging
import socket
from typing import Final, Protocol

from kvbaton.base.ids import EngineAddress, Rank
from kvbaton.protocol import events
from kvbaton.protocol import peer as p
from kvbaton.protocol.machine import Effect, Event
from kvbaton.runtime.config import CourierConfig
from kvbaton.runtime.dial import DialledLink
from kvbaton.runtime.inbound import Inbound
from kvbaton.runtime.link import AcceptedLink, Link, LinkHost
from kvbaton.runtime.outbound import Outbound

_log = logging.getLogger(__name__)

MAX_STRANGERS: Final = 128
"""Connections that have not said who they are; each may hold one introduction in memory."""


class LinksHost(LinkHost, Protocol):
    """What the links need from the courier."""

    config: CourierConfig
    inbound: Inbound
    outbound: Outbound


class Links:
    """Who is connected, who is being greeted, and who is dead but not buried.

    Owner: courier.
    """

    def __init__(self, host: LinksHost, rank: Rank) -> None:
        """Start with none; `rank` is ours, and so that of our counterparts."""
        self._host = host
        self._rank = rank
        self._dialled: dict[tuple[EngineAddress, Rank], DialledLink] = {}
        self._accepted: set[AcceptedLink] = set()
        self._strangers: dict[AcceptedLink, float] = {}  # until when, in the order of their coming
        self._draining: dict[Link, float] = {}

    @property
    def draining(self) -> bool:
        """Whether a dead peer's last bytes may still be on their way out of our kernel."""
        return bool(self._draining)

    @property
    def num_strangers(self) -> int:
        """Connections that have not said who they are."""
        return len(self._strangers)

    def known(self) -> list[Link]:
        """Links to ranks we dial, or that have introduced themselves."""
        return [*self._dialled.values(), *self._accepted]

    def dialled(self, address: EngineAddress) -> Link:
        """Our counterpart rank of another engine, new or known; never a process that is dead."""
        key = (address, self._rank)
        link = self._dialled.get(key)
        if link is None or link.peer.state is p.PeerState.DEAD:
            link = self._dialled[key] = DialledLink(self._host, address, self._rank)
        return link

    def accept(self, sock: socket.socket) -> None:
        """Greet somebody who dialled us, in place of the stranger who has dawdled longest if there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._show_out(next(iter(self._strangers)), "too many strangers are waiting")
        try:
            link = AcceptedLink(self._host, sock, self._forget)
        except OSError:  # gone before we could greet it
            sock.close()
            return
        self._strangers[link] = self._host.now() + self._host.times.dial_s

    def _show_out(self, link: AcceptedLink, why: str) -> None:
        _log.warning("%s did not introduce itself: %s", link.name, why)
        link.close()
        self._forget(link)

    def next_deadline(self) -> float | None:
        """Earliest deadline."""
        deadlines = [link.peer.next_deadline() for link in self.known()]
        deadlines += [*self._strangers.values(), *self._draining.values()]
        return min((each for each in deadlines if each is not None), default=None)

    def tick(self, now: float) -> None:
        """Deliver deadlines that have passed."""
        for link in self.known():
            deadline = link.peer.next_deadline()
            if deadline is not None and deadline <= now:
                link.feed(p.Tick())
        for stranger, until in list(self._strangers.items()):
            if until <= now:
                self._show_out(stranger, f"{self._host.times.dial_s:g} s have passed")
        for link, until in list(self._draining.items()):
            if until <= now:
                del self._draining[link]
                self._bury(link)

    def announce(self, link: Link, announcement: Effect) -> None:
        """A peer's state changed: tell the handoffs."""
        match announcement:
            case p.AnnounceReady():
                if isinstance(link, AcceptedLink):
                    self._strangers.pop(link, None)
                    self._accepted.add(link)
                self._tell(link, events.PeerReady())
            case p.AnnounceUnreachable():
                self._tell(link, events.PeerUnreachable(announcement.reason, announcement.detail))
                if not self._host.inbound.uses(link):  # the next request dials afresh
                    link.close()
                    self._forget(link)
            case p.AnnounceSilent():
                _log.warning("%s is silent", link.name)
                self._tell(link, events.PeerSilent())
            case p.AnnounceDead():
                # bytes it had sent may still be in our kernel's buffers: receive them before blocks are given back
                drain_s = 0.0 if link.accepted else self._host.config.dead_drain_s
                if not link.accepted:
                    self._host.inbound.rehome(link)
                self._draining[link] = self._host.now() + drain_s

    def _tell(self, link: Link, event: Event) -> None:
        if not link.accepted:
            self._host.inbound.on_peer(link, event)
        elif not isinstance(event, events.PeerReady):
            self._host.outbound.on_peer(link, event)

    def _bury(self, link: Link) -> None:
        """A dead peer: end its handoffs, forget it."""
        _log.warning("%s is gone", link.name)
        self._tell(link, events.PeerDead())
        link.close()
        self._forget(link)
        if link.agent is not None and not any(other.agent == link.agent for other in self.known()):
            self._host.transport.disconnect(link.agent)

    def _forget(self, link: Link) -> None:
        if isinstance(link, AcceptedLink):
            self._accepted.discard(link)
            self._strangers.pop(link, None)
        elif isinstance(link, DialledLink) and self._dialled.get((link.address, link.rank)) is link:
            del self._dialled[(link.address, link.rank)]

    def close(self) -> None:
        """Hang up on everybody."""
        for link in [*self.known(), *self._strangers]:
            link.close()
