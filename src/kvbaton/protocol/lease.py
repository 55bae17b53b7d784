"""Lease: how long a producer keeps one request's blocks on one rank, and for whom.

Law 1: whatever changes a lease is in this file.
Law 2: it does not know push from pull; a leg that has closed has nothing in flight, whoever posted.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final

from kvbaton.base.errors import FailureReason
from kvbaton.protocol import effects, events
from kvbaton.protocol.machine import Event, Machine


class LeaseState(Enum):
    """Who may use the blocks."""

    COMPUTING = auto()  # the scheduler owns the request; it is still prefilling
    HELD = auto()  # finished; blocks wait for consumers
    ENDING = auto()  # nobody new may come; legs are closing
    ENDED = auto()


TERMINAL: Final = frozenset({LeaseState.ENDED})


class Lease(Machine[LeaseState]):
    """One prefill's blocks on one rank.

    Owner: courier. Lifetime: from the request's first step to Free, which is emitted exactly once.
    """

    def __init__(self, *, ttl_s: float) -> None:
        """The request is computing.

        Args:
            ttl_s: how long finished blocks wait while no consumer is registered.
        """
        super().__init__(LeaseState.COMPUTING)
        self._ttl_s = ttl_s
        self._deadline: float | None = None
        self._num_legs = 0
        self._num_received = 0
        self._fan_out = 1
        self._epoch = 0
        self._unwanted: FailureReason | None = None
        self._report = False

    def next_deadline(self) -> float | None:
        """When DeadlinePassed is due, if ever."""
        return self._deadline if self.state is LeaseState.HELD else None

    @property
    def num_legs(self) -> int:
        """Legs that have not closed."""
        return self._num_legs

    @property
    def accepts_legs(self) -> bool:
        """Whether a consumer may still register."""
        return self.state in (LeaseState.COMPUTING, LeaseState.HELD) and self._num_received < self._fan_out

    def _leg_opened(self, event: events.LegOpened, now: float) -> LeaseState:
        self._num_legs += 1
        if event.epoch > self._epoch:
            self._epoch, self._fan_out, self._num_received = event.epoch, 1, 0
        self._fan_out = max(self._fan_out, event.fan_out)
        self._deadline = None
        self._unwanted = None
        return self.state

    def _leg_received(self, event: events.LegReceived, now: float) -> LeaseState:
        self._num_legs -= 1
        self._num_received += 1
        return self._settle(now)

    def _leg_declined(self, event: events.LegDeclined, now: float) -> LeaseState:
        self._num_legs -= 1
        self._unwanted = self._unwanted or FailureReason.ABORTED
        return self._settle(now)

    def _leg_lost(self, event: events.LegLost, now: float) -> LeaseState:
        self._num_legs -= 1
        return self._settle(now)

    def _release(self, event: events.ReleaseAsked, now: float) -> LeaseState:
        self._unwanted = FailureReason.RELEASED
        if self._num_legs:
            self._emit(effects.CloseLegs(FailureReason.RELEASED))
        return self._settle(now)

    def _release_ending(self, event: events.ReleaseAsked, now: float) -> LeaseState:
        """It frees as soon as the legs are closed; nobody needs to wait for those that still send."""
        self._emit(effects.CloseLegs(FailureReason.RELEASED))
        return LeaseState.ENDING

    def _finished(self, event: events.Finished, now: float) -> LeaseState:
        self._report = True
        self.state = LeaseState.HELD
        return self._settle(now)

    def _aborted(self, event: events.Aborted, now: float) -> LeaseState:
        self._report = event.held
        self._unwanted = FailureReason.PREFILL_ABORTED
        if self._num_legs:
            self._emit(effects.CloseLegs(FailureReason.PREFILL_ABORTED))
        self.state = LeaseState.ENDING
        return self._settle(now)

    def _expired(self, event: events.DeadlinePassed, now: float) -> LeaseState:
        self._unwanted = FailureReason.LEASE_EXPIRED
        return self._settle(now)

    def _settle(self, now: float) -> LeaseState:
        """Free once nobody reads and nobody will; otherwise wait, with a deadline only while no leg is open."""
        done = self._num_received >= self._fan_out
        if self.state is LeaseState.COMPUTING or (
            self.state is LeaseState.HELD and not (done or self._unwanted)
        ):
            self._deadline = None if self._num_legs else now + self._ttl_s
            return self.state
        if self._num_legs:
            return LeaseState.ENDING
        self._deadline = None
        self._emit(effects.Free(self._report, None if done else self._unwanted))
        return LeaseState.ENDED


TRANSITIONS: Final[Mapping[tuple[Enum, type[Event]], Callable[..., Enum]]] = {
    **{
        (state, event): handler
        for state in (LeaseState.COMPUTING, LeaseState.HELD)
        for event, handler in (
            (events.LegOpened, Lease._leg_opened),
            (events.LegReceived, Lease._leg_received),
            (events.LegDeclined, Lease._leg_declined),
            (events.LegLost, Lease._leg_lost),
            (events.ReleaseAsked, Lease._release),
        )
    },
    (LeaseState.COMPUTING, events.Finished): Lease._finished,
    (LeaseState.COMPUTING, events.Aborted): Lease._aborted,
    (LeaseState.HELD, events.DeadlinePassed): Lease._expired,
    (LeaseState.ENDING, events.LegReceived): Lease._leg_received,
    (LeaseState.ENDING, events.LegDeclined): Lease._leg_declined,
    (LeaseState.ENDING, events.LegLost): Lease._leg_lost,
    (LeaseState.ENDING, events.ReleaseAsked): Lease._release_ending,
}
Lease.transitions = TRANSITIONS
