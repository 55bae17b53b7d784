"""Consumer: the receiving side of one handoff with one producer rank.

Law 1: whatever changes a consumer's state is in this file.
Law 2: it knows push from pull only through `producer_posts`, which decides what must have ended before blocks are given back:
the producer's WRITEs (proved by Cancelled, Failed or its death) or our own READs.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol import effects, events
from kvbaton.protocol.machine import Event, Machine, Unexpected
from kvbaton.protocol.mode import Mode, producer_posts

CANCEL_RETRY_S: Final = 1.0
CONNECT_S: Final = 10.0
"""How long a handoff waits for its producer to be reachable: long enough for a restart to be noticed, short enough to try another."""
MAX_TRANSFERS: Final = 1 << 20


class ConsumerState(Enum):
    """Where a handoff stands for the consumer."""

    CONNECTING = auto()  # the peer is not ready; nobody knows our blocks
    REGISTERED = auto()  # the producer knows our blocks; nothing has come
    RECEIVING = auto()  # some of it has come
    CHECKING = auto()  # all bytes are here, checksums are being compared
    CONFIRMING = auto()  # READs are done; were the blocks held throughout?
    CANCELLING = auto()  # Cancel is out; WRITEs may still land
    QUARANTINED = auto()  # a silent peer's WRITEs may still land
    DRAINING = auto()  # failed; READs of ours have not ended
    COMMITTED = auto()
    FAILED = auto()


TERMINAL: Final = frozenset({ConsumerState.COMMITTED, ConsumerState.FAILED})


class Consumer(Machine[ConsumerState]):
    """One handoff's receiving side.

    Owner: courier. Lifetime: from the scheduler's allocation to Commit or Fail, of which exactly one is emitted.
    """

    def __init__(
        self, mode: Mode, blocks: tuple[GroupBlocks, ...], *, verify: bool, ttl_s: float, now: float
    ) -> None:
        """Wait for the peer.

        Args:
            mode: who posts.
            blocks: per group, our blocks that are to be filled.
            verify: whether to compare checksums before committing.
            ttl_s: after this the handoff is cancelled.
            now: seconds.
        """
        super().__init__(ConsumerState.CONNECTING)
        self.mode = mode
        self.blocks = blocks
        self.verify = verify
        self.reason: FailureReason | None = None
        self.detail = ""
        self._expires = now + ttl_s
        self._deadline: float | None = min(self._expires, now + CONNECT_S)
        self._seen: set[int] = set()
        self._total: int | None = None
        self._sealed = False
        self._checksums = b""
        self._num_reading = 0
        self._offered_end = [group.first for group in blocks]
        self._next_offer = 0

    def next_deadline(self) -> float | None:
        """When DeadlinePassed is due, if ever."""
        return None if self.state in TERMINAL else self._deadline

    @property
    def num_missing(self) -> int | None:
        """Transfers announced but not arrived; None while their number is unknown."""
        return None if self._total is None else self._total - len(self._seen)

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _register(self, event: events.PeerReady, now: float) -> ConsumerState:
        self._deadline = self._expires
        self._emit(effects.SendRegister())
        return ConsumerState.REGISTERED

    def _unreachable(self, event: events.PeerUnreachable, now: float) -> ConsumerState:
        return self._fail(event.reason, event.detail)

    def _give_up_unknown(self, event: Event, now: float) -> ConsumerState:
        """Nobody knows our blocks, so nothing can write into them."""
        self._emit(effects.Decline())
        return self._fail(_why(event), "before the producer could be reached")

    def _lost_unknown(self, event: Event, now: float) -> ConsumerState:
        return self._fail(_why(event), "while connecting")

    # --- push ---------------------------------------------------------------------------------------------------------

    def _write(self, event: events.WriteArrived, now: float) -> ConsumerState:
        if event.seq in self._seen:
            self._emit(Unexpected(self.state.name, "WriteArrived again"))
            return self.state
        if self.mode is not Mode.PUSH or not self._plausible(event.seq, event.total):
            return self._cancel(
                FailureReason.PROTOCOL, f"write {event.seq} of {event.total} does not fit", now
            )
        self._seen.add(event.seq)
        if event.total is not None:
            self._total = event.total
        return self._advance(now)

    def _count(self, event: events.TotalArrived, now: float) -> ConsumerState:
        if self.mode is not Mode.PUSH or not self._plausible(-1, event.total):
            return self._cancel(FailureReason.PROTOCOL, f"a total of {event.total} does not fit", now)
        self._total = event.total
        return self._advance(now)

    def _seal(self, event: events.SealedArrived, now: float) -> ConsumerState:
        if self.mode is not Mode.PUSH or not self._plausible(-1, event.total):
            return self._cancel(FailureReason.PROTOCOL, f"sealed at {event.total} does not fit", now)
        self._total = event.total
        self._sealed = True
        self._checksums = event.checksums
        return self._advance(now)

    def _plausible(self, seq: int, total: int | None) -> bool:
        if seq >= MAX_TRANSFERS:
            return False
        known = self._total if total is None else total
        if self._total is not None and known != self._total:
            return False
        return known is None or (
            seq < known and len(self._seen) <= known and max(self._seen, default=-1) < known
        )

    def _advance(self, now: float) -> ConsumerState:
        """All writes in? Checksums come with Sealed, so verifying waits for that too."""
        if self._total is None or len(self._seen) < self._total or (self.verify and not self._sealed):
            return ConsumerState.RECEIVING
        return self._complete()

    # --- pull ---------------------------------------------------------------------------------------------------------

    def _offer(self, event: events.OfferArrived, now: float) -> ConsumerState:
        if self.mode is not Mode.PULL or event.seq != self._next_offer or not self._wanted(event):
            return self._cancel(FailureReason.PROTOCOL, f"offer {event.seq} does not fit", now)
        self._next_offer += 1
        self._offered_end = [
            max(end, group.end) for end, group in zip(self._offered_end, event.groups, strict=True)
        ]
        if event.last:
            self._sealed = True
            self._checksums = event.checksums
        if any(group.ids.size for group in event.groups):
            self._num_reading += 1
            self._emit(effects.PostRead(event.seq, event.groups))
            return ConsumerState.RECEIVING
        return self._reads_ended()

    def _wanted(self, event: events.OfferArrived) -> bool:
        """Offers continue where the last one ended and never exceed what we registered; the last one completes it."""
        if self._sealed or len(event.groups) != len(self.blocks):
            return False
        for ours, end, theirs in zip(self.blocks, self._offered_end, event.groups, strict=True):
            if theirs.ids.size and (theirs.first != end or theirs.end > ours.end):
                return False
            if event.last and max(end, theirs.end if theirs.ids.size else end) != ours.end:
                return False
        return True

    def _read(self, event: events.ReadEnded, now: float) -> ConsumerState:
        self._num_reading -= 1
        if not event.ok:
            return self._cancel(FailureReason.TRANSFER_FAILED, event.detail, now)
        return self._reads_ended()

    def _reads_ended(self) -> ConsumerState:
        if self._num_reading or not self._sealed:
            return ConsumerState.RECEIVING
        return self._complete()

    def _drained(self, event: events.ReadEnded, now: float) -> ConsumerState:
        self._num_reading -= 1
        return ConsumerState.DRAINING if self._num_reading else self._fail_as_recorded()

    # --- all bytes are here -------------------------------------------------------------------------------------------

    def _complete(self) -> ConsumerState:
        if self.verify:
            self._emit(effects.CheckBlocks(self._checksums))
            return ConsumerState.CHECKING
        return self._accept()

    def _accept(self) -> ConsumerState:
        self._emit(effects.SendReceived())
        if producer_posts(self.mode):
            self._emit(effects.Commit())
            return ConsumerState.COMMITTED
        return ConsumerState.CONFIRMING

    def _checked(self, event: events.Checked, now: float) -> ConsumerState:
        if event.ok:
            return self._accept()
        self._emit(effects.SendCancel(FailureReason.CHECKSUM))
        return self._fail(FailureReason.CHECKSUM, event.detail)

    def _confirmed(self, event: events.ConfirmedArrived, now: float) -> ConsumerState:
        self._emit(effects.Commit())
        return ConsumerState.COMMITTED

    def _give_up_quiet(self, event: Event, now: float) -> ConsumerState:
        """Everything has ended already, so the blocks can go back at once."""
        self._emit(effects.SendCancel(_why(event)))
        return self._fail(_why(event), "after all bytes had arrived")

    def _lost_checking(self, event: Event, now: float) -> ConsumerState:
        """A push needs the peer no more; a pull can never be confirmed now."""
        return self.state if producer_posts(self.mode) else self._fence(event, now)

    # --- the end by failure -------------------------------------------------------------------------------------------

    def _give_up(self, event: Event, now: float) -> ConsumerState:
        return self._cancel(_why(event), "", now)

    def _cancel(self, reason: FailureReason, detail: str, now: float) -> ConsumerState:
        self._note(reason, detail)
        self._emit(effects.SendCancel(reason))
        if producer_posts(self.mode):
            self._deadline = now + CANCEL_RETRY_S
            return ConsumerState.CANCELLING
        return self._end_reads()

    def _end_reads(self) -> ConsumerState:
        self._deadline = None
        if not self._num_reading:
            return self._fail_as_recorded()
        self._emit(effects.Quarantined(self.reason or FailureReason.INTERNAL))
        return ConsumerState.DRAINING

    def _cancel_again(self, event: events.DeadlinePassed, now: float) -> ConsumerState:
        self._deadline = now + CANCEL_RETRY_S
        self._emit(effects.SendCancel(self.reason or FailureReason.INTERNAL))
        return ConsumerState.CANCELLING

    def _fence(self, event: Event, now: float) -> ConsumerState:
        """Proof that the producer's WRITEs have ended (for a pull there are none)."""
        if isinstance(event, events.FailedArrived):
            self._note(event.reason, event.detail)
        else:
            self._note(_why(event), "")
        return self._end_reads()

    def _silent(self, event: events.PeerSilent, now: float) -> ConsumerState:
        self._note(FailureReason.PEER_SILENT, "heartbeats stopped")
        self._deadline = None
        if not producer_posts(self.mode):
            return self._end_reads()
        self._emit(effects.Quarantined(self.reason or FailureReason.PEER_SILENT))
        return ConsumerState.QUARANTINED

    def _spoke(self, event: events.PeerReady, now: float) -> ConsumerState:
        return self._cancel(self.reason or FailureReason.PEER_SILENT, self.detail, now)

    def _same(self, event: Event, now: float) -> ConsumerState:
        return self.state

    def _note(self, reason: FailureReason, detail: str) -> None:
        """The first reason is the one reported."""
        if self.reason is None:
            self.reason, self.detail = reason, detail

    def _fail(self, reason: FailureReason, detail: str) -> ConsumerState:
        self._note(reason, detail)
        return self._fail_as_recorded()

    def _fail_as_recorded(self) -> ConsumerState:
        self._emit(effects.Fail(self.reason or FailureReason.INTERNAL, self.detail))
        return ConsumerState.FAILED


def _why(event: Event) -> FailureReason:
    match event:
        case events.Abort():
            return FailureReason.ABORTED
        case events.DeadlinePassed():
            return FailureReason.DEADLINE
        case events.PeerDead():
            return FailureReason.PEER_LOST
        case events.PeerSilent():
            return FailureReason.PEER_SILENT
        case events.CancelledArrived():
            return FailureReason.PROTOCOL
        case _:
            return FailureReason.INTERNAL


TRANSITIONS: Final[Mapping[tuple[Enum, type[Event]], Callable[..., Enum]]] = {
    # State: CONNECTING
    (ConsumerState.CONNECTING, events.PeerReady): Consumer._register,
    (ConsumerState.CONNECTING, events.PeerUnreachable): Consumer._unreachable,
    (ConsumerState.CONNECTING, events.PeerSilent): Consumer._lost_unknown,
    (ConsumerState.CONNECTING, events.PeerDead): Consumer._lost_unknown,
    (ConsumerState.CONNECTING, events.DeadlinePassed): Consumer._give_up_unknown,
    (ConsumerState.CONNECTING, events.Abort): Consumer._give_up_unknown,
    # State: REGISTERED and RECEIVING
    **{
        (state, event): handler
        for state in (ConsumerState.REGISTERED, ConsumerState.RECEIVING)
        for event, handler in (
            (events.WriteArrived, Consumer._write),
            (events.TotalArrived, Consumer._count),
            (events.SealedArrived, Consumer._seal),
            (events.OfferArrived, Consumer._offer),
            (events.FailedArrived, Consumer._fence),
            (events.CancelledArrived, Consumer._fence),
            (events.PeerReady, Consumer._same),
            (events.PeerSilent, Consumer._silent),
            (events.PeerDead, Consumer._fence),
            (events.DeadlinePassed, Consumer._give_up),
            (events.Abort, Consumer._give_up),
        )
    },
    (ConsumerState.RECEIVING, events.ReadEnded): Consumer._read,
    # State: CHECKING
    (ConsumerState.CHECKING, events.Checked): Consumer._checked,
    (ConsumerState.CHECKING, events.Abort): Consumer._give_up_quiet,
    (ConsumerState.CHECKING, events.DeadlinePassed): Consumer._give_up_quiet,
    (ConsumerState.CHECKING, events.FailedArrived): Consumer._lost_checking,
    (ConsumerState.CHECKING, events.CancelledArrived): Consumer._lost_checking,
    (ConsumerState.CHECKING, events.PeerReady): Consumer._same,
    (ConsumerState.CHECKING, events.PeerSilent): Consumer._lost_checking,
    (ConsumerState.CHECKING, events.PeerDead): Consumer._lost_checking,
    # State: CONFIRMING
    (ConsumerState.CONFIRMING, events.ConfirmedArrived): Consumer._confirmed,
    (ConsumerState.CONFIRMING, events.FailedArrived): Consumer._fence,
    (ConsumerState.CONFIRMING, events.CancelledArrived): Consumer._fence,
    (ConsumerState.CONFIRMING, events.PeerReady): Consumer._same,
    (ConsumerState.CONFIRMING, events.PeerSilent): Consumer._silent,
    (ConsumerState.CONFIRMING, events.PeerDead): Consumer._fence,
    (ConsumerState.CONFIRMING, events.DeadlinePassed): Consumer._give_up_quiet,
    (ConsumerState.CONFIRMING, events.Abort): Consumer._give_up_quiet,
    # State: CANCELLING
    (ConsumerState.CANCELLING, events.CancelledArrived): Consumer._fence,
    (ConsumerState.CANCELLING, events.FailedArrived): Consumer._fence,
    (ConsumerState.CANCELLING, events.PeerDead): Consumer._fence,
    (ConsumerState.CANCELLING, events.PeerSilent): Consumer._silent,
    (ConsumerState.CANCELLING, events.PeerReady): Consumer._same,
    (ConsumerState.CANCELLING, events.DeadlinePassed): Consumer._cancel_again,
    (ConsumerState.CANCELLING, events.Abort): Consumer._same,
    (ConsumerState.CANCELLING, events.WriteArrived): Consumer._same,
    (ConsumerState.CANCELLING, events.TotalArrived): Consumer._same,
    (ConsumerState.CANCELLING, events.SealedArrived): Consumer._same,
    # State: QUARANTINED
    (ConsumerState.QUARANTINED, events.PeerReady): Consumer._spoke,
    (ConsumerState.QUARANTINED, events.PeerDead): Consumer._fence,
    (ConsumerState.QUARANTINED, events.CancelledArrived): Consumer._fence,
    (ConsumerState.QUARANTINED, events.FailedArrived): Consumer._fence,
    (ConsumerState.QUARANTINED, events.PeerSilent): Consumer._same,
    (ConsumerState.QUARANTINED, events.Abort): Consumer._same,
    (ConsumerState.QUARANTINED, events.WriteArrived): Consumer._same,
    (ConsumerState.QUARANTINED, events.TotalArrived): Consumer._same,
    (ConsumerState.QUARANTINED, events.SealedArrived): Consumer._same,
    # State: DRAINING
    (ConsumerState.DRAINING, events.ReadEnded): Consumer._drained,
    (ConsumerState.DRAINING, events.PeerReady): Consumer._same,
    (ConsumerState.DRAINING, events.PeerSilent): Consumer._same,
    (ConsumerState.DRAINING, events.PeerDead): Consumer._same,
    (ConsumerState.DRAINING, events.Abort): Consumer._same,
}
Consumer.transitions = TRANSITIONS
