"""Producer: the sending side of one handoff with one consumer rank (a leg of the request's lease).

Law 1: whatever changes a producer's state is in this file.
Law 2: it never looks at block ids, only at block indices; whoever owns the block table turns spans into addresses.

Self-clocked: at most `max_in_flight` WRITEs; when one ends, everything that became final since goes into the next. A fast link
therefore sends chunk by chunk and a slow one coalesces, without a tuning knob.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import lt
from typing import Final

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import num_final_blocks
from kvbaton.kv.layout import Group
from kvbaton.protocol import effects, events
from kvbaton.protocol.effects import Span
from kvbaton.protocol.machine import Event, Machine
from kvbaton.protocol.mode import Mode, producer_posts


class ProducerState(Enum):
    """Where a leg stands for the producer."""

    PARKED = auto()  # registered before the prefill is known here
    SENDING = auto()  # prefill known; blocks go out as they become final
    SEALED = auto()  # everything was sent or offered; waiting for Received
    DRAINING = auto()  # failed or cancelled; WRITEs have not ended
    RECEIVED = auto()
    CLOSED = auto()


TERMINAL: Final = frozenset({ProducerState.RECEIVED, ProducerState.CLOSED})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a consumer rank registered, as block indices.

    Attributes:
        mode: who posts.
        spans: per group, in group order.
        num_tokens: the prompt's length as the consumer has it.
        digest: of the prompt as the consumer has it.
        verify: checksums of all blocks are taken when everything was sent.
    """

    mode: Mode
    spans: tuple[Span, ...]
    num_tokens: int
    digest: bytes
    verify: bool = False


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """What bounds a leg.

    Attributes:
        park_s: how long a registration waits for its prefill to be known.
        received_s: how long sent blocks wait for Received.
        max_in_flight: WRITEs posted at once.
        stream: whether blocks go out before the prefill has ended.
        num_regions: regions of the layout, which the layer tail counts.
    """

    park_s: float
    received_s: float
    max_in_flight: int = 2
    stream: bool = True
    num_regions: int = 1


class Producer(Machine[ProducerState]):
    """One handoff's sending side.

    Owner: courier. Lifetime: from Register to LegClosed, which is emitted exactly once.
    """

    def __init__(self, wanted: Wanted, groups: tuple[Group, ...], limits: ProducerLimits, now: float) -> None:
        """Wait for the prefill to be known."""
        super().__init__(ProducerState.PARKED)
        self.wanted = wanted
        self._groups = groups
        self._limits = limits
        self._deadline: float | None = now + limits.park_s
        self._frontier: events.Frontier | None = None
        self._sent = [span.start for span in wanted.spans]
        self._tail = 0  # of the blocks in _tail_spans, so many leading regions were sent
        self._tail_spans: tuple[Span, ...] = ()
        self._posted = 0
        self._in_flight = 0
        self._announced = False
        self._received = False
        self._closing: FailureReason | None = None
        self._detail = ""
        self._answer_cancelled = False

    def next_deadline(self) -> float | None:
        """When DeadlinePassed is due, if ever."""
        return None if self.state in TERMINAL else self._deadline

    @property
    def num_in_flight(self) -> int:
        """WRITEs posted and not ended."""
        return self._in_flight

    @property
    def may_send_more(self) -> bool:
        """Whether what is in flight may not be the last of it, so that nobody waits for its end."""
        return self.state is ProducerState.SENDING and not self._announced

    # --- sending ------------------------------------------------------------------------------------------------------

    def _move_frontier(self, event: events.Frontier, now: float) -> ProducerState:
        self._deadline = None
        self._frontier = event
        refusal = self._refusal(event)
        if refusal:
            return self._close(FailureReason.INCOMPATIBLE, refusal)
        return self._pump(now)

    def _refusal(self, frontier: events.Frontier) -> str:
        """Why this prefill is not what the consumer registered for; empty if it is."""
        wanted = self.wanted
        if wanted.num_tokens != frontier.num_tokens:
            return f"the consumer's prompt has {wanted.num_tokens} tokens, ours {frontier.num_tokens}"
        if wanted.digest and frontier.digest and wanted.digest != frontier.digest:
            return "the consumer's prompt has other tokens than ours"
        if len(wanted.spans) != len(frontier.num_blocks):
            return f"the consumer has {len(wanted.spans)} KV cache groups, we have {len(frontier.num_blocks)}"
        if frontier.ended:
            for span, num_blocks in zip(wanted.spans, frontier.num_blocks, strict=True):
                if span.end > num_blocks:
                    return f"group {span.group}: {span.end} blocks wanted, {num_blocks} exist"
        return ""

    def _pump(self, now: float) -> ProducerState:
        if self._announced:  # all is posted, so a later preemption changes nothing
            return ProducerState.SENDING if self._in_flight else self._seal(now)
        frontier = self._frontier
        if frontier is None or not (frontier.ended or self._limits.stream):
            return ProducerState.SENDING
        if not producer_posts(self.wanted.mode):
            return self._offer(now) if frontier.ended else ProducerState.SENDING
        spans, first, end = self._next(frontier)
        while spans and self._in_flight < self._limits.max_in_flight:
            self._post(frontier, spans, first, end)
            spans, first, end = self._next(frontier)
        if frontier.ended and not spans:
            if not self._in_flight:
                return self._seal(now)
            if not self._announced:
                self._announced = True
                self._emit(effects.AnnounceTotal(self._posted))
        return ProducerState.SENDING

    def _next(self, frontier: events.Frontier) -> tuple[tuple[Span, ...], int, int]:
        """What goes into the next WRITE: spans and a range of regions.

        Once regions of a tail were sent, further regions of the same blocks follow before anything else; when its step has
        ended the rest of them does, whatever the layer hooks reported or missed. Else whole blocks go before a new tail.
        """
        num_regions, tail = self._limits.num_regions, frontier.tail
        if self._tail:
            end = num_regions if self._covers(frontier) else 0
            if tail is not None and end == 0 and self._covers(tail):
                end = min(tail.num_regions, num_regions)
            return (self._tail_spans, self._tail, end) if end > self._tail else ((), 0, 0)
        if spans := self._spans(frontier, frontier.num_blocks):
            return spans, 0, num_regions
        if tail is None or tail.num_regions == 0:
            return (), 0, 0
        # a block named only later would miss the regions sent by then
        if tail.ended and any(map(lt, frontier.num_blocks, (span.end for span in self.wanted.spans))):
            return (), 0, 0
        return self._spans(tail, frontier.num_blocks), 0, min(tail.num_regions, num_regions)

    def _post(self, frontier: events.Frontier, spans: tuple[Span, ...], first: int, end: int) -> None:
        if end == self._limits.num_regions:
            for span in spans:
                self._sent[span.group] = span.end
            self._tail, self._tail_spans = 0, ()
        else:
            self._tail, self._tail_spans = end, spans
        self._posted += 1
        self._in_flight += 1
        self._announced = frontier.ended and not self._next(frontier)[0]
        total = self._posted if self._announced else None
        self._emit(effects.PostWrite(self._posted - 1, spans, total, first, end))

    def _covers(self, reached: events.Frontier | events.Tail) -> bool:
        """Whether the blocks whose leading regions were sent are final so far."""
        finals = (
            num_final_blocks(self._groups[span.group], reached.final_tokens, ended=reached.ended)
            for span in self._tail_spans
        )
        return all(
            final is None or final >= span.end for final, span in zip(finals, self._tail_spans, strict=True)
        )

    def _spans(self, reached: events.Frontier | events.Tail, num_blocks: Sequence[int]) -> tuple[Span, ...]:
        """Wanted blocks that are final so far and have not been sent."""
        spans = []
        for group, span, sent, known in zip(
            self._groups, self.wanted.spans, self._sent, num_blocks, strict=True
        ):
            final = num_final_blocks(group, reached.final_tokens, ended=reached.ended)
            end = min(span.end, known if final is None else min(final, known))
            if end > sent:
                spans.append(Span(span.group, sent, end))
        return tuple(spans)

    def _seal(self, now: float) -> ProducerState:
        if self._received:
            self._emit(effects.LegClosed(None))
            return ProducerState.RECEIVED
        self._emit(effects.Seal(self._posted))
        self._deadline = now + self._limits.received_s
        return ProducerState.SEALED

    def _offer(self, now: float) -> ProducerState:
        self._emit(effects.MakeOffer(0, self.wanted.spans))
        self._deadline = now + self._limits.received_s
        return ProducerState.SEALED

    def _write_ended(self, event: events.TransferEnded, now: float) -> ProducerState:
        self._in_flight -= 1
        if not event.ok:
            return self._close(FailureReason.TRANSFER_FAILED, event.detail)
        return self._pump(now)

    def _preempted(self, event: events.Preempted, now: float) -> ProducerState:
        """What was sent stays right; the rest waits until the same tokens have been computed again.

        With checksums everything is sent again: they are taken from the blocks computed last, which need not equal the earlier ones to the bit.

        Invariant: the shell lets the scheduler reuse the blocks only when no WRITE is in flight.
        """
        self._frontier = None
        if self.wanted.verify:
            if self._announced:
                return self._close(FailureReason.PREEMPTED, "the blocks to be verified were taken back")
            self._sent = [span.start for span in self.wanted.spans]
        # the tail's blocks are sent again in full, so that all layers of a block come from one computation
        self._tail, self._tail_spans = 0, ()
        return ProducerState.SENDING

    def _preempted_sealed(self, event: events.Preempted, now: float) -> ProducerState:
        """What was written is with the consumer; what was offered may be overwritten while the consumer reads it."""
        if producer_posts(self.wanted.mode):
            return ProducerState.SEALED
        return self._close(FailureReason.PREEMPTED, "the offered blocks were taken back")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _received_early(self, event: events.ReceivedArrived, now: float) -> ProducerState:
        """The consumer saw the last notification before we saw the last transfer end."""
        if not self._announced:
            return self._close(FailureReason.PROTOCOL, "received before everything was sent")
        self._received = True
        return self._pump(now)

    def _received_all(self, event: events.ReceivedArrived, now: float) -> ProducerState:
        if not producer_posts(self.wanted.mode):
            self._emit(effects.SendConfirmed())
        self._emit(effects.LegClosed(None))
        return ProducerState.RECEIVED

    def _cancel(self, event: events.CancelArrived, now: float) -> ProducerState:
        self._answer_cancelled = True
        return self._close(event.reason, "the consumer cancelled")

    def _cancel_draining(self, event: events.CancelArrived, now: float) -> ProducerState:
        self._answer_cancelled = True
        return ProducerState.DRAINING

    def _lose(self, event: events.PrefillLost, now: float) -> ProducerState:
        return self._close(event.reason, event.detail)

    def _lose_peer(self, event: Event, now: float) -> ProducerState:
        silent = isinstance(event, events.PeerSilent)
        return self._close(
            FailureReason.PEER_SILENT if silent else FailureReason.PEER_LOST, "the consumer is gone"
        )

    def _park_over(self, event: events.DeadlinePassed, now: float) -> ProducerState:
        return self._close(
            FailureReason.UNKNOWN_TRANSFER, f"no prefill by this transfer_id within {self._limits.park_s:g} s"
        )

    def _lease_over(self, event: events.DeadlinePassed, now: float) -> ProducerState:
        return self._close(FailureReason.LEASE_EXPIRED, f"not received within {self._limits.received_s:g} s")

    def _same(self, event: Event, now: float) -> ProducerState:
        return self.state

    def _close(self, reason: FailureReason, detail: str) -> ProducerState:
        self._closing, self._detail = reason, detail
        self._deadline = None
        return ProducerState.DRAINING if self._in_flight else self._closed()

    def _drained(self, event: events.TransferEnded, now: float) -> ProducerState:
        self._in_flight -= 1
        return ProducerState.DRAINING if self._in_flight else self._closed()

    def _closed(self) -> ProducerState:
        """Only here, with nothing in flight, the consumer is told; that message is its fence."""
        reason = self._closing or FailureReason.INTERNAL
        if self._answer_cancelled:
            self._emit(effects.SendCancelled())
        else:
            self._emit(effects.SendFailed(reason, self._detail))
        self._emit(effects.LegClosed(reason))
        return ProducerState.CLOSED


TRANSITIONS: Final[Mapping[tuple[Enum, type[Event]], Callable[..., Enum]]] = {
    # State: PARKED
    (ProducerState.PARKED, events.Frontier): Producer._move_frontier,
    (ProducerState.PARKED, events.PeerReady): Producer._same,
    (ProducerState.PARKED, events.Preempted): Producer._same,
    (ProducerState.PARKED, events.CancelArrived): Producer._cancel,
    (ProducerState.PARKED, events.PrefillLost): Producer._lose,
    (ProducerState.PARKED, events.PeerSilent): Producer._lose_peer,
    (ProducerState.PARKED, events.PeerDead): Producer._lose_peer,
    (ProducerState.PARKED, events.DeadlinePassed): Producer._park_over,
    # State: SENDING
    (ProducerState.SENDING, events.Frontier): Producer._move_frontier,
    (ProducerState.SENDING, events.PeerReady): Producer._same,
    (ProducerState.SENDING, events.TransferEnded): Producer._write_ended,
    (ProducerState.SENDING, events.Preempted): Producer._preempted,
    (ProducerState.SENDING, events.ReceivedArrived): Producer._received_early,
    (ProducerState.SENDING, events.CancelArrived): Producer._cancel,
    (ProducerState.SENDING, events.PrefillLost): Producer._lose,
    (ProducerState.SENDING, events.PeerSilent): Producer._lose_peer,
    (ProducerState.SENDING, events.PeerDead): Producer._lose_peer,
    # State: SEALED
    (ProducerState.SEALED, events.Frontier): Producer._same,
    (ProducerState.SEALED, events.PeerReady): Producer._same,
    (ProducerState.SEALED, events.Preempted): Producer._preempted_sealed,
    (ProducerState.SEALED, events.ReceivedArrived): Producer._received_all,
    (ProducerState.SEALED, events.CancelArrived): Producer._cancel,
    (ProducerState.SEALED, events.PrefillLost): Producer._lose,
    (ProducerState.SEALED, events.PeerSilent): Producer._lose_peer,
    (ProducerState.SEALED, events.PeerDead): Producer._lose_peer,
    (ProducerState.SEALED, events.DeadlinePassed): Producer._lease_over,
    # State: DRAINING
    (ProducerState.DRAINING, events.TransferEnded): Producer._drained,
    (ProducerState.DRAINING, events.PeerReady): Producer._same,
    (ProducerState.DRAINING, events.CancelArrived): Producer._cancel_draining,
    (ProducerState.DRAINING, events.Frontier): Producer._same,
    (ProducerState.DRAINING, events.Preempted): Producer._same,
    (ProducerState.DRAINING, events.PrefillLost): Producer._same,
    (ProducerState.DRAINING, events.PeerSilent): Producer._same,
    (ProducerState.DRAINING, events.PeerDead): Producer._same,
}
Producer.transitions = TRANSITIONS
