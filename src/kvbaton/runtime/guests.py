"""Guests: who is at the directory's door, how many, and for how long."""

from collections.abc import Callable
from typing import Final, Protocol

MAX_GUESTS: Final = 256
GREETING_S: Final = 5.0
"""How long a guest may take to prove who it is, and a message may take to be delivered."""
IDLE_S: Final = 600.0
"""How long an admitted guest may say nothing."""


class Guest(Protocol):
    """A connection that can be ended."""

    def leave(self) -> None:
        """Close; must not call back."""
        ...


class GuestBook:
    """Guests and when they have to go, the most overdue first.

    Owner: the directory's thread.
    """

    def __init__(self, now: Callable[[], float], greeting_s: float) -> None:
        """Args: now: seconds. greeting_s: until a guest must have been admitted."""
        self._now = now
        self._greeting_s = greeting_s
        self._until: dict[Guest, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def enter(self, guest: Guest) -> None:
        """Somebody came; whoever has least time left makes room where the house is full."""
        if len(self._until) >= MAX_GUESTS:
            self._show_out(min(self._until, key=self._until.__getitem__))
        self._until[guest] = self._now() + self._greeting_s

    def admitted(self, guest: Guest) -> None:
        """It has proved who it is, or said something sensible since."""
        if guest in self._until:
            self._until[guest] = self._now() + IDLE_S

    def forget(self, guest: Guest) -> None:
        """It has left."""
        self._until.pop(guest, None)

    def next_deadline(self) -> float | None:
        """When `tick` is due, if ever."""
        return min(self._until.values(), default=None)

    def tick(self) -> None:
        """Show out whoever has stayed too long."""
        now = self._now()
        for guest in [guest for guest, until in self._until.items() if until <= now]:
            self._show_out(guest)

    def close(self) -> None:
        """Show everybody out."""
        for guest in list(self._until):
            self._show_out(guest)

    def _show_out(self, guest: Guest) -> None:
        del self._until[guest]
        guest.leave()
