"""Effects: everything the shell has to do for a handoff."""

from dataclasses import dataclass

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol.machine import Effect


@dataclass(frozen=True, slots=True)
class Span:
    """Block indices start..end-1 of one request in one cache group."""

    group: int
    start: int
    end: int


# --- consumer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRegister(Effect):
    """Tell the producer which blocks are to be filled."""


@dataclass(frozen=True, slots=True)
class SendReceived(Effect):
    """Tell the producer that everything is here."""


@dataclass(frozen=True, slots=True)
class SendCancel(Effect):
    """Ask the producer to stop."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Decline(Effect):
    """Tell the producer, once it can be reached, that nobody will come."""


@dataclass(frozen=True, slots=True)
class PostRead(Effect):
    """READ the producer's blocks into ours."""

    seq: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class CheckBlocks(Effect):
    """Compare the registered blocks with the producer's checksums and answer with Checked."""

    checksums: bytes


@dataclass(frozen=True, slots=True)
class Quarantined(Effect):
    """The handoff has failed, but a transfer may still write into its blocks; Fail follows when none can."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Commit(Effect):
    """Every block is right; the request may use them."""


@dataclass(frozen=True, slots=True)
class Fail(Effect):
    """The handoff failed, and nothing can write into its blocks any more."""

    reason: FailureReason
    detail: str


# --- producer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostWrite(Effect):
    """WRITE these spans.

    Attributes:
        seq: counts from 0.
        spans: which blocks.
        total: number of transfers, when this is known to be the last one.
        first_region: only regions from this one on.
        end_region: only regions before this one.
    """

    seq: int
    spans: tuple[Span, ...]
    total: int | None
    first_region: int
    end_region: int


@dataclass(frozen=True, slots=True)
class AnnounceTotal(Effect):
    """Tell the consumer how many transfers there are; the last of them was posted before that was known."""

    total: int


@dataclass(frozen=True, slots=True)
class Seal(Effect):
    """Tell the consumer that all `total` transfers ended well."""

    total: int


@dataclass(frozen=True, slots=True)
class MakeOffer(Effect):
    """Tell the consumer which blocks it may READ."""

    seq: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class SendConfirmed(Effect):
    """Tell the consumer that its READs were valid."""


@dataclass(frozen=True, slots=True)
class SendFailed(Effect):
    """Tell the consumer that nothing more will come."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class SendCancelled(Effect):
    """Answer a Cancel."""


@dataclass(frozen=True, slots=True)
class LegClosed(Effect):
    """This leg has ended and none of its transfers is in flight.

    Attributes:
        reason: None when the consumer received everything.
    """

    reason: FailureReason | None


# --- lease ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloseLegs(Effect):
    """End every open leg of this request."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Free(Effect):
    """No transfer reads these blocks any more.

    Attributes:
        report: whether the scheduler waits to hear it.
        reason: None when the consumer received everything.
    """

    report: bool
    reason: FailureReason | None
