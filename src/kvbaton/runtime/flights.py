"""Flights: posted transfers, polled until they end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.base.errors import KvbatonError, TransportError
from kvbaton.base.ids import TransferHandle
from kvbaton.kv.plan import Plan
from kvbaton.runtime.link import Link
from kvbaton.transport.base import Operation, TransferState, Transport

_log = logging.getLogger(__name__)

Ended = Callable[[bool, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    handle: TransferHandle
    ended: Ended


class Flights:
    """All transfers this rank has posted.

    Owner: courier.
    """

    def __init__(self, transport: Transport) -> None:
        """Start with none."""
        self._transport = transport
        self._flights: list[_Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def post(self, operation: Operation, link: Link, plan: Plan, notification: bytes, ended: Ended) -> None:
        """Post a transfer; `ended(ok, detail)` follows exactly once, at once where it cannot be posted."""
        try:
            if link.acquaintance is None:
                raise TransportError("the peer has not introduced itself")
            # a failed transfer drops the connection; connecting again is free while it stands
            agent = self._transport.connect(link.acquaintance.identity.agent_metadata)
            handle = self._transport.post(operation, agent, plan, notification)
        except KvbatonError as error:
            ended(False, str(error))
            return
        self._flights.append(_Flight(handle, ended))

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
        for flight, ok in landed:
            try:
                self._transport.release(flight.handle)
            except TransportError as error:
                _log.warning("a transfer cannot be released: %s", error)
            flight.ended(ok, "" if ok else "the transport reported a failure")
        return bool(landed)

    def _state(self, flight: _Flight) -> TransferState:
        try:
            return self._transport.poll(flight.handle)
        except TransportError as error:
            _log.warning("a transfer cannot be polled: %s", error)
            return TransferState.FAILED
