"""Events: everything that can happen to a handoff."""

from dataclasses import dataclass
from typing import ClassVar

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol.machine import Event


class _Remote(Event):
    __slots__ = ()
    remote: ClassVar[bool] = True


# --- about the peer, to both sides ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReady(Event):
    """The peer can be talked to (again)."""


@dataclass(frozen=True, slots=True)
class PeerUnreachable(Event):
    """The peer could not be reached or will not talk; nothing was ever registered with it."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class PeerSilent(Event):
    """Heartbeats stopped; the process may be frozen, so its transfers may still land."""


@dataclass(frozen=True, slots=True)
class PeerDead(Event):
    """The peer's process is known to be gone and its last bytes have been drained."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed(Event):
    """The time in `next_deadline` has come."""


# --- to the consumer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteArrived(_Remote):
    """A WRITE and its notification are here."""

    seq: int
    total: int | None


@dataclass(frozen=True, slots=True)
class TotalArrived(_Remote):
    """The producer says how many transfers there are; some may still be on their way."""

    total: int


@dataclass(frozen=True, slots=True)
class SealedArrived(_Remote):
    """The producer says how many transfers there were, all of them ended."""

    total: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class OfferArrived(_Remote):
    """Blocks of the producer that may be READ."""

    seq: int
    groups: tuple[GroupBlocks, ...]
    last: bool
    checksums: bytes


@dataclass(frozen=True, slots=True)
class ConfirmedArrived(_Remote):
    """The producer held the offered blocks throughout."""


@dataclass(frozen=True, slots=True)
class FailedArrived(_Remote):
    """The producer gave up; none of its transfers is in flight."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class CancelledArrived(_Remote):
    """The producer answers Cancel; none of its transfers is in flight."""


@dataclass(frozen=True, slots=True)
class ReadEnded(Event):
    """A READ of ours has ended; no byte moves any more."""

    seq: int
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """The checksums of all registered blocks were compared."""

    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Abort(Event):
    """The local request does not want the KV any more."""


# --- to the producer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tail:
    """How far the step that runs now has come: the leading regions its forward is through.

    Attributes:
        num_regions: so many leading regions.
        final_tokens: tokens whose KV is final in these regions.
        ended: the last prompt token is among them.
    """

    num_regions: int
    final_tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Frontier(Event):
    """How far the local prefill has come.

    Attributes:
        final_tokens: tokens whose KV cannot change any more.
        ended: the last prompt token is among them.
        num_blocks: per group, how many blocks of the request the producer can name now.
        digest: of the prompt as the producer has it.
        num_tokens: of the whole prompt.
        tail: while a step runs that is sent layer by layer: what it has made final beyond `final_tokens`.
    """

    final_tokens: int
    ended: bool
    num_blocks: tuple[int, ...]
    digest: bytes
    num_tokens: int
    tail: Tail | None = None


@dataclass(frozen=True, slots=True)
class TransferEnded(Event):
    """A WRITE of ours has ended; no byte moves any more."""

    seq: int
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PrefillLost(Event):
    """The local request ended without usable KV, or its blocks must be given up."""

    reason: FailureReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The scheduler took the request's blocks back; it will compute them again elsewhere."""


@dataclass(frozen=True, slots=True)
class ReceivedArrived(_Remote):
    """The consumer has everything."""


@dataclass(frozen=True, slots=True)
class CancelArrived(_Remote):
    """The consumer wants it to stop."""

    reason: FailureReason


# --- to the lease -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LegOpened(Event):
    """A consumer rank registered.

    Attributes:
        fan_out: how many consumer ranks this producer rank has to serve.
        epoch: of the registration; a newer one starts the count of served ranks afresh.
    """

    fan_out: int
    epoch: int = 0


class LegOutcome(Event):
    """Root of the ways in which a leg closes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LegReceived(LegOutcome):
    """The consumer rank has its KV."""


@dataclass(frozen=True, slots=True)
class LegDeclined(LegOutcome):
    """The consumer does not want it any more; nobody else will."""


@dataclass(frozen=True, slots=True)
class LegLost(LegOutcome):
    """The leg failed; another consumer may still come for the blocks."""


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The scheduler finished the request and holds its blocks until told otherwise."""


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """The request ended without usable KV.

    Attributes:
        held: whether the scheduler waits for a report before it frees blocks.
    """

    held: bool


@dataclass(frozen=True, slots=True)
class ReleaseAsked(Event):
    """Nobody will come for these blocks."""
