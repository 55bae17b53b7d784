"""Faults: what can be made to go wrong with one transfer between memory agents."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DropNotification:
    """The data arrives, its notification never does."""


@dataclass(frozen=True, slots=True)
class RepeatNotification:
    """The notification arrives `copies` times."""

    copies: int = 2


@dataclass(frozen=True, slots=True)
class LateNotification:
    """The notification arrives after the next one to the same target (or with `release_held`)."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The transfer stays PENDING for this many polls more than it would."""

    polls: int


@dataclass(frozen=True, slots=True)
class Hold:
    """The transfer stays PENDING until `MemoryNetwork.release_held`."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The transfer moves its first `after_bytes` bytes and then ends FAILED."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """`post` raises TransferFailed and nothing moves."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One byte of the data is inverted on the way.

    Attributes:
        offset_bytes: which byte, counted over the plan's ranges in order.
    """

    offset_bytes: int = 0


Fault = DropNotification | RepeatNotification | LateNotification | Delay | Hold | Fail | Refuse | Corrupt
