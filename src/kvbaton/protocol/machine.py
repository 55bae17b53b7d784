"""Machine: what all state machines here share, a transition table and the rule for pairs it does not list."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar, Generic, TypeVar, cast

from kvbaton.base.errors import LocalProtocolError


class Event:
    """Something that happened; subclasses are frozen dataclasses."""

    __slots__ = ()
    remote: ClassVar[bool] = False
    """True when a peer causes it: such an event in the wrong state is ignored and counted, never an error of ours."""


class Effect:
    """Something the shell has to do; subclasses are frozen dataclasses."""

    __slots__ = ()


class Unexpected(Effect):
    """A peer's event met a state that has no use for it; the shell counts it."""

    __slots__ = ("event", "state")

    def __init__(self, state: str, event: str) -> None:
        """Name the state and the event, as metrics label them."""
        self.state = state
        self.event = event

    def __repr__(self) -> str:
        """Show both names."""
        return f"Unexpected({self.event} in {self.state})"


S = TypeVar("S", bound=Enum)


class Machine(Generic[S]):
    """A state, a table, and the effects gathered while one event is handled.

    Owner: the courier thread (or a simulator).
    A handler returns the next state. A pair absent from the table leaves everything as it is: a peer's event yields
    `Unexpected`, one of ours raises LocalProtocolError.
    """

    transitions: ClassVar[Mapping[tuple[Enum, type[Event]], Callable[..., Enum]]]

    def __init__(self, state: S) -> None:
        """Start in `state`."""
        self.state: S = state
        self._effects: list[Effect] = []

    def receive(self, event: Event, now: float) -> list[Effect]:
        """Handle one event.

        Args:
            event: what happened.
            now: seconds on the owner's monotonic clock.
        Returns:
            Effects, in the order in which the shell must perform them.
        Raises:
            LocalProtocolError: our own event does not fit the state, which is unchanged.
        """
        handler = self.transitions.get((self.state, type(event)))
        if handler is None:
            if event.remote:
                return [Unexpected(self.state.name, type(event).__name__)]
            raise LocalProtocolError(
                f"{type(event).__name__} does not fit {type(self).__name__} in {self.state.name}"
            )
        self._effects = []
        self.state = cast(S, handler(self, event, now))
        return self._effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)
