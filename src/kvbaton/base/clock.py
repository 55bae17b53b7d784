"""The clock protocol: time is an argument in the core and a dependency in the shell."""

from typing import Protocol


class Clock(Protocol):
    """Seconds on one monotonic clock; only differences mean anything, and they never cross processes."""

    def __call__(self) -> float:
        """Return the current time in seconds."""
        ...
