"""Drive: feed events to one state machine and perform its effects in order, also when performing one causes the next event."""

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from kvbaton.protocol.machine import Effect, Event, Machine

S = TypeVar("S", bound=Enum)


class Drive(Generic[S]):
    """A queue in front of a machine.

    Owner: courier.
    """

    def __init__(
        self, machine: Machine[S], perform: Callable[[Effect], None], now: Callable[[], float]
    ) -> None:
        """Args: machine: fed by nobody else. perform: carries out one effect; may call `feed`."""
        self._machine = machine
        self._perform = perform
        self._now = now
        self._queue: deque[Event] = deque()
        self._running = False

    def feed(self, event: Event) -> None:
        """Handle an event, now or after the one being handled."""
        self._queue.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                for effect in self._machine.receive(self._queue.popleft(), self._now()):
                    self._perform(effect)
        finally:
            self._running = False
            self._queue.clear()
