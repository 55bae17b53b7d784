"""Peer: whether another rank's process can be talked to, is silent, or is known to be dead.

Law 1: whatever changes a peer's state is in this file.
Law 2: silence is not death. Death is a refused connection at the process's own address, another boot epoch there, or an orderly end
of its connection (its kernel closed it) after which nobody accepts one there. Only death, or the peer's own word, frees blocks it might
still write into. An orderly end alone proves nothing: a peer that dislikes a message may hang up with WRITEs still in flight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvbaton.base.errors import FailureReason
from kvbaton.protocol.machine import Effect, Event, Machine


class PeerState(Enum):
    """What is known about a remote process."""

    DIALLING = auto()  # never reached yet; an attempt is under way
    WAITING = auto()  # never reached yet; the next attempt comes after a pause
    READY = auto()
    SILENT = auto()  # connected, but heartbeats have stopped
    PROBING = auto()  # the connection ended; an attempt to learn why is under way
    PAUSING = auto()  # as PROBING, between attempts
    DEAD = auto()


TERMINAL: Final = frozenset({PeerState.DEAD})


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Times of a peer's life.

    Attributes:
        interval_s: between pings.
        lost_after_s: without a word for this long the peer is silent.
        dial_s: how long one connection attempt may take.
        pause_min_s: pause after the first failed attempt; doubles up to pause_max_s.
        pause_max_s: longest pause.
    """

    interval_s: float = 1.0
    lost_after_s: float = 3.0
    dial_s: float = 3.0
    pause_min_s: float = 0.1
    pause_max_s: float = 2.0


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcomed(Event):
    """Handshake complete: the process that was expected."""


@dataclass(frozen=True, slots=True)
class DialFailed(Event):
    """The attempt ended without a handshake.

    Attributes:
        gone: proof that the expected process no longer exists.
        reason: for those who wait.
        detail: for people.
    """

    gone: bool
    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """The rank's own address accepted a connection: a listener, and so its process, exists, however long it says nothing."""


@dataclass(frozen=True, slots=True)
class Heard(Event):
    """Any message came."""


@dataclass(frozen=True, slots=True)
class ConnectionEnded(Event):
    """The connection is gone.

    Attributes:
        orderly: its kernel closed it; false for resets and time-outs on the way.
    """

    orderly: bool


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The time in `next_deadline` has come."""


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dial(Effect):
    """Start a connection attempt; `probe` asks the rank itself, not the engine's directory."""

    probe: bool


@dataclass(frozen=True, slots=True)
class HangUp(Effect):
    """Abandon the attempt or connection."""


@dataclass(frozen=True, slots=True)
class SendPing(Effect):
    """Send a heartbeat."""


@dataclass(frozen=True, slots=True)
class AnnounceReady(Effect):
    """Handoffs may talk to it."""


@dataclass(frozen=True, slots=True)
class AnnounceUnreachable(Effect):
    """Handoffs waiting for it fail."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class AnnounceSilent(Effect):
    """Handoffs with it fail, but what it may write into stays quarantined."""


@dataclass(frozen=True, slots=True)
class AnnounceDead(Effect):
    """It will never write again."""


class Peer(Machine[PeerState]):
    """One remote process, as seen from the side that dialled it (or, `accepted`, was dialled).

    Owner: courier.
    """

    def __init__(self, times: Heartbeat, now: float, *, accepted: bool = False) -> None:
        """Dial at the first Tick, or start READY when the peer dialled us."""
        super().__init__(PeerState.READY if accepted else PeerState.WAITING)
        self._times = times
        self._accepted = accepted
        self._pause_s = times.pause_min_s
        self._last_heard = now
        self._orderly = False
        self._lives = False  # since its connection ended, something accepted one at its address
        self._deadline: float | None = now + times.interval_s if accepted else now

    def next_deadline(self) -> float | None:
        """When Tick is due, if ever."""
        return self._deadline

    @property
    def ready(self) -> bool:
        """Whether messages can be sent now."""
        return self.state is PeerState.READY

    def _dial(self, event: Tick, now: float) -> PeerState:
        self._emit(Dial(probe=False))
        self._deadline = now + self._times.dial_s
        return PeerState.DIALLING

    def _probe(self, event: Event, now: float) -> PeerState:
        self._emit(Dial(probe=True))
        self._deadline = now + self._times.dial_s
        return PeerState.PROBING

    def _welcome(self, event: Welcomed, now: float) -> PeerState:
        self._pause_s = self._times.pause_min_s
        self._last_heard = now
        self._deadline = now + self._times.interval_s
        self._emit(AnnounceReady())
        return PeerState.READY

    def _dial_failed(self, event: DialFailed, now: float) -> PeerState:
        self._emit(AnnounceUnreachable(event.reason, event.detail))
        return self._pause(now, PeerState.WAITING)

    def _dial_timed_out(self, event: Tick, now: float) -> PeerState:
        self._emit(HangUp())
        detail = f"no handshake within {self._times.dial_s:g} s"
        self._emit(AnnounceUnreachable(FailureReason.PEER_UNREACHABLE, detail))
        return self._pause(now, PeerState.WAITING)

    def _probe_failed(self, event: DialFailed, now: float) -> PeerState:
        dead = event.gone or (self._orderly and not self._lives)
        return self._die() if dead else self._pause(now, PeerState.PAUSING)

    def _probe_accepted(self, event: Accepted, now: float) -> PeerState:
        self._lives = True
        return PeerState.PROBING

    def _probe_timed_out(self, event: Tick, now: float) -> PeerState:
        self._emit(HangUp())
        dead = self._orderly and not self._lives
        return self._die() if dead else self._pause(now, PeerState.PAUSING)

    def _pause(self, now: float, state: PeerState) -> PeerState:
        self._deadline = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._times.pause_max_s)
        return state

    def _heard(self, event: Heard, now: float) -> PeerState:
        self._last_heard = now
        return self.state

    def _heard_again(self, event: Heard, now: float) -> PeerState:
        self._last_heard = now
        self._emit(AnnounceReady())
        return PeerState.READY

    def _beat(self, event: Tick, now: float) -> PeerState:
        self._deadline = now + self._times.interval_s
        self._emit(SendPing())
        if self.state is PeerState.READY and now - self._last_heard >= self._times.lost_after_s:
            self._emit(AnnounceSilent())
            return PeerState.SILENT
        return self.state

    def _ended(self, event: ConnectionEnded, now: float) -> PeerState:
        if self._accepted:
            return self._die()
        self._orderly = event.orderly
        self._lives = False
        if self.state is PeerState.READY:
            self._emit(AnnounceSilent())
        return self._probe(event, now)

    def _die(self) -> PeerState:
        self._deadline = None
        self._emit(AnnounceDead())
        return PeerState.DEAD

    def _same(self, event: Event, now: float) -> PeerState:
        return self.state


TRANSITIONS: Final[Mapping[tuple[Enum, type[Event]], Callable[..., Enum]]] = {
    (PeerState.WAITING, Tick): Peer._dial,
    (PeerState.DIALLING, Welcomed): Peer._welcome,
    (PeerState.DIALLING, DialFailed): Peer._dial_failed,
    (PeerState.DIALLING, Tick): Peer._dial_timed_out,
    (PeerState.DIALLING, Accepted): Peer._same,
    (PeerState.READY, Heard): Peer._heard,
    (PeerState.READY, Tick): Peer._beat,
    (PeerState.READY, ConnectionEnded): Peer._ended,
    (PeerState.SILENT, Heard): Peer._heard_again,
    (PeerState.SILENT, Tick): Peer._beat,
    (PeerState.SILENT, ConnectionEnded): Peer._ended,
    (PeerState.PROBING, Welcomed): Peer._welcome,
    (PeerState.PROBING, Accepted): Peer._probe_accepted,
    (PeerState.PROBING, DialFailed): Peer._probe_failed,
    (PeerState.PROBING, Tick): Peer._probe_timed_out,
    (PeerState.PAUSING, Tick): Peer._probe,
    (PeerState.DEAD, Heard): Peer._same,
    (PeerState.DEAD, ConnectionEnded): Peer._same,
}
Peer.transitions = TRANSITIONS
