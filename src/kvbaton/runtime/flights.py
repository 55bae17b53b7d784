"""Flights: posted transfers, polled until they end."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvbaton.base.errors import KvbatonError
from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.plan import Plan
from kvbaton.runtime.link import Link
from kvbaton.runtime.link_speed import LinkSpeed
from kvbaton.transport.base import Operation, TransferState, Transport

_log = logging.getLogger(__name__)

_SOCKET_BYTES: Final = 1 << 19
_LONG_PAUSE_S: Final = 0.01

Ended = Callable[[bool, str], None]
Awaited = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    handle: TransferHandle
    agent: AgentName
    num_bytes: int
    posted: float
    due: float
    ended: Ended
    is_awaited: Awaited


class Flights:
    """All transfers this rank has posted.

    Owner: courier.
    """

    def __init__(self, transport: Transport, speed: LinkSpeed, now: Callable[[], float]) -> None:
        """Start with none; measure into `speed`."""
        self._transport = transport
        self._speed = speed
        self._now = now
        self._flights: list[_Flight] = []
        self._last_landed = -math.inf
        self._last_due = -math.inf

    def __len__(self) -> int:
        return len(self._flights)

    def post(
        self,
        operation: Operation,
        link: Link,
        plan: Plan,
        notification: bytes,
        ended: Ended,
        is_awaited: Awaited,
    ) -> None:
        """Post a transfer.

        Args:
            operation: direction.
            link: to whom.
            plan: what.
            notification: delivered behind a WRITE.
            ended: called exactly once with (ok, detail), at once where it cannot be posted.
            is_awaited: whether somebody waits for its end now; the end of another one may be noticed a little late.
        """
        if link.acquaintance is None or link.agent is None:
            ended(False, "the peer has not introduced itself")
            return
        try:
            # a failed transfer drops the connection; connecting again is free while it stands
            started = self._now()
            agent = self._transport.connect(link.acquaintance.identity.agent_metadata)
            handle = self._transport.post(operation, agent, plan, notification)
        except KvbatonError as error:
            ended(False, str(error))
        except Exception as error:  # noqa: BLE001
            # not in the contract, so it may have been posted: without the connection nothing moves
            _log.exception("a transfer could not be posted")
            self._transport.disconnect(link.agent)
            ended(False, f"{type(error).__name__}: {error}")
        else:
            posted = self._now()
            self._speed.posted(posted - started)
            # one wire: what was posted before goes first
            self._last_due = max(posted, self._last_due) + self._speed.expected_s(plan.num_bytes)
            self._flights.append(
                _Flight(handle, agent, plan.num_bytes, started, self._last_due, ended, is_awaited)
            )

    def pause_s(self, *, late_s: float) -> float | None:
        """How long they may be left alone; `late_s` where one should have ended by now, None where there is none.

        Halving what is left finds the end of a long transfer with few looks, but a software transport moves bytes only when it is
        looked at, and then as many as the sockets hold. Every look costs the computing thread its caches, so the end of a transfer that
        nobody waits for, because more of the same prompt is to follow, is not looked for.
        """
        if not self._flights:
            return None
        carry_s = min(self._speed.expected_s(_SOCKET_BYTES), _LONG_PAUSE_S)
        left_s = min(
            (flight.due - self._now() for flight in self._flights if flight.is_awaited()), default=math.inf
        )
        return late_s if left_s <= 0 else min(left_s / 2, carry_s)

    def poll(self) -> bool:
        """Advance everything. Returns whether anything ended."""
        still: list[_Flight] = []
        landed: list[tuple[_Flight, bool]] = []
        for flight in self._flights:
            state = self._state(flight)
            if state is TransferState.PENDING:
                still.append(flight)
            else:
                landed.append((flight, state is TransferState.DONE))
        self._flights = still
        if landed:
            self._measure([flight for flight, ok in landed if ok])
        for flight, ok in landed:
            try:
                self._transport.release(flight.handle)
            except Exception as error:  # noqa: BLE001  # its bytes have moved; that is what counts
                _log.warning("a transfer cannot be released: %r", error)
            flight.ended(ok, "" if ok else "the transport reported a failure")
        return bool(landed)

    def _measure(self, landed: list[_Flight]) -> None:
        """The time a transfer waited behind another one on the wire is not its own."""
        now = self._now()
        self._last_due = max((flight.due for flight in self._flights), default=now)
        if not landed:
            return
        began = max(self._last_landed, min(flight.posted for flight in landed))
        self._speed.landed(sum(flight.num_bytes for flight in landed), now - began)
        self._last_landed = now

    def _state(self, flight: _Flight) -> TransferState:
        try:
            return self._transport.poll(flight.handle)
        except Exception as error:  # noqa: BLE001  # one transfer's trouble must not keep the others from ending
            _log.warning("a transfer cannot be polled, its connection is dropped: %r", error)
            return self._break(flight)

    def _break(self, flight: _Flight) -> TransferState:
        """A transfer of unknown state has ended for certain only once its connection is gone."""
        try:
            self._transport.disconnect(flight.agent)
        except Exception as error:  # noqa: BLE001  # then its blocks stay held: leaking is safe, freeing is not
            _log.warning("the connection to %s cannot be dropped: %r", flight.agent, error)
            return TransferState.PENDING
        return TransferState.FAILED
