"""Link: the connection to one remote rank, dialled or accepted, driven by the peer machine."""

import logging
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from kvbaton.base.errors import IncompatiblePeer, RemoteProtocolError, TransportError
from kvbaton.kv.layout import Layout
from kvbaton.protocol import peer as p
from kvbaton.protocol.machine import Effect, Event
from kvbaton.runtime.channel import Channel
from kvbaton.runtime.greeting import Acquaintance, ListenerGreeting, meet, refusal, welcome
from kvbaton.transport.base import Transport
from kvbaton.wire.frame import MAX_FRAME_BYTES
from kvbaton.wire.messages import (
    AnyMessage,
    Hello,
    Identity,
    Introduce,
    Lookup,
    Ping,
    Pong,
    Release,
)

if TYPE_CHECKING:
    from kvbaton.base.ids import AgentName

_log = logging.getLogger(__name__)

MAX_INTRODUCTION_BYTES: Final = 4 * 1024 * 1024
"""Memory that somebody who has proved nothing yet may fill."""


class LinkHost(Protocol):
    """What a link needs from the courier."""

    selector: selectors.BaseSelector
    transport: Transport
    identity: Identity
    layout: Layout
    secret: bytes | None
    times: p.Heartbeat

    def now(self) -> float:
        """Seconds on the courier's clock."""
        ...

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run on the courier's thread; callable from any."""
        ...

    def on_link_message(self, link: "Link", message: AnyMessage) -> None:
        """A handoff message came from a known peer."""
        ...

    def on_link_announcement(self, link: "Link", announcement: Effect) -> None:
        """The peer's state changed."""
        ...


class Link:
    """One remote rank.

    Owner: courier. Lifetime: until the peer is DEAD and its handoffs have ended.
    """

    def __init__(self, host: LinkHost, name: str, *, accepted: bool) -> None:
        """Args: name: for logs. accepted: the peer dialled us."""
        self._host = host
        self.name = name
        self.accepted = accepted
        self.peer = p.Peer(host.times, host.now(), accepted=accepted)
        self.channel: Channel | None = None
        self.agent: AgentName | None = None
        self.acquaintance: Acquaintance | None = None

    def is_same_process(self, other: "Link") -> bool:
        """Whether both lead to one process, as after a reset or when an engine has two names."""
        return self is other or (self.agent is not None and self.agent == other.agent)

    def __repr__(self) -> str:
        """Name and state."""
        return f"Link({self.name}, {self.peer.state.name})"

    @property
    def layout(self) -> Layout:
        """The peer's layout; only once it has introduced itself."""
        if self.acquaintance is None:
            raise RemoteProtocolError("the peer has not introduced itself")
        return self.acquaintance.layout

    def send(self, message: AnyMessage) -> None:
        """Queue a message; dropped when there is no connection."""
        if self.channel is not None:
            self.channel.send(message)

    def feed(self, event: Event) -> None:
        """Give the peer machine an event and perform what it asks."""
        for effect in self.peer.receive(event, self._host.now()):
            match effect:
                case p.Dial():
                    self._dial(probe=effect.probe)
                case p.HangUp():
                    self._hang_up()
                case p.SendPing():
                    self.send(Ping())
                case _:
                    self._host.on_link_announcement(self, effect)

    def adopt(self, acquaintance: Acquaintance) -> None:
        """The peer fits; make its memory reachable. Raises TransportError."""
        self.agent = self._host.transport.connect(acquaintance.identity.agent_metadata)
        self.acquaintance = acquaintance
        if self.channel:
            self.channel.allow(MAX_FRAME_BYTES)

    def handle(self, message: AnyMessage) -> None:
        """A message after the greeting."""
        self.feed(p.Heard())
        match message:
            case Ping():
                self.send(Pong(message.seq))
            case Pong():
                pass
            case _:
                self._host.on_link_message(self, message)

    def close(self) -> None:
        """Drop the connection without telling anybody."""
        self._hang_up()

    def _dial(self, *, probe: bool) -> None:
        del probe
        raise NotImplementedError

    def _hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class AcceptedLink(Link):
    """A rank (or a router's messenger) that dialled us."""

    def __init__(
        self, host: LinkHost, sock: socket.socket, on_gone: Callable[["AcceptedLink"], None]
    ) -> None:
        """Greet; `on_gone` is called once if the guest leaves before it is a peer."""
        super().__init__(host, f"{sock.getpeername()}", accepted=True)
        self._greeting = ListenerGreeting(host.secret)
        self._messenger = False
        self._on_gone = on_gone
        self.channel = Channel(host.selector, sock, self)

    def on_open(self) -> None:
        """Never: it was open when it came."""

    def on_message(self, message: AnyMessage) -> None:
        """Greeting first, then handoffs."""
        if self.acquaintance is not None:
            self.handle(message)
            return
        try:
            self._greet(message)
        except (IncompatiblePeer, RemoteProtocolError) as error:
            _log.warning("refused %s: %s", self.name, error)
            self._turn_away(error)
        except TransportError as error:
            _log.warning("refused %s: its transport metadata cannot be used: %s", self.name, error)
            self._turn_away(RemoteProtocolError(f"transport metadata cannot be used: {error}"))

    def _greet(self, message: AnyMessage) -> None:
        if self.channel is None:
            return
        match message:
            case Hello():
                self.channel.send(self._greeting.challenge(message))
                self.channel.allow(MAX_INTRODUCTION_BYTES)
            case Lookup():
                self._greeting.admit(message)
                self._messenger = True
            case Introduce():
                self._greeting.admit(message)
                self.adopt(meet(self._host.identity, self._host.layout, message.identity))
                self.name = f"{message.identity.engine_id}/{message.identity.pp}.{message.identity.tp}"
                self.channel.send(welcome(self._host.identity))
                self.feed(p.Heard())
                self._host.on_link_announcement(self, p.AnnounceReady())
            case Release() if self._messenger:
                self._host.on_link_message(self, message)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} before an introduction")

    def _turn_away(self, error: IncompatiblePeer | RemoteProtocolError) -> None:
        if self.channel is not None:
            self.channel.send(refusal(error))
            self.channel.close_after_flush()
        self._on_gone(self)

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        """A peer's end is an event; a stranger's is not."""
        del refused, detail
        self.channel = None
        if self.acquaintance is None:
            self._on_gone(self)
        else:
            self.feed(p.ConnectionEnded(orderly))
