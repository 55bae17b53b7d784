"""Leg: one consumer rank served from one prefill; performs what a producer machine asks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kvbaton.base.errors import FailureReason, KvbatonError, RemoteProtocolError
from kvbaton.base.ids import HandoffKey
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.kv.plan import BlockPairs, plan_transfer
from kvbaton.protocol import effects, events
from kvbaton.protocol.effects import Span
from kvbaton.protocol.machine import Effect, Event, Unexpected
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.producer import TERMINAL, Producer, ProducerLimits, ProducerState, Wanted
from kvbaton.runtime.drive import Drive
from kvbaton.runtime.handoffs import HandoffHost
from kvbaton.runtime.link import Link
from kvbaton.runtime.observe import HandoffRecord
from kvbaton.transport.base import Operation
from kvbaton.wire import messages as m
from kvbaton.wire.translate import blocks_from_wire, blocks_to_wire, key_from_wire, key_to_wire

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """A consumer's Register, checked.

    Attributes:
        key: the handoff.
        mode: who posts.
        groups: per KV cache group, the consumer's blocks.
        num_tokens: of its prompt.
        digest: of its prompt.
        fan_out: how many consumer ranks this rank has to serve.
        verify: whether checksums are wanted.
    """

    key: HandoffKey
    mode: Mode
    groups: tuple[GroupBlocks, ...]
    num_tokens: int
    digest: bytes
    fan_out: int
    verify: bool


def read_registration(link: Link, message: m.Register, num_groups: int) -> Registration:
    """Check a consumer's Register.

    Raises:
        RemoteProtocolError: an unknown mode, other cache groups, or block ids that cannot be.
    """
    try:
        mode = Mode(message.mode)
    except ValueError:
        raise RemoteProtocolError(f"mode {message.mode!r} is unknown here") from None
    groups = blocks_from_wire(message.groups)
    if len(groups) != num_groups:
        raise RemoteProtocolError(f"{len(groups)} KV cache groups registered, {num_groups} exist")
    for index, group in enumerate(groups):
        if group.ids.size and int(group.ids.max()) >= link.layout.num_blocks:
            raise RemoteProtocolError(f"group {index}: a block id is outside the consumer's own pool")
        if np.unique(group.ids).size != group.ids.size:
            raise RemoteProtocolError(f"group {index}: a block id is registered twice")
    return Registration(
        key=key_from_wire(message.key),
        mode=mode,
        groups=groups,
        num_tokens=message.num_tokens,
        digest=message.prompt_digest,
        fan_out=message.fan_out,
        verify=message.verify,
    )


class BlockSource(Protocol):
    """Where a leg finds the prefill's blocks."""

    def block_ids(self, group: int, start: int, end: int) -> GroupBlocks:
        """Blocks start..end-1 of one group."""
        ...

    @property
    def request_name(self) -> str:
        """The prefilling request, or ""."""
        ...

    @property
    def ended_at(self) -> float | None:
        """When its last token was computed."""
        ...


@dataclass(slots=True)
class _Tally:
    """What a leg has done, for the record."""

    registered: float
    matched: float | None = None
    first: float | None = None
    last: float | None = None
    post_s: float = 0.0
    transfers: int = 0
    descriptors: int = 0
    bytes: int = 0
    streamed_bytes: int = 0
    tail_transfers: int = 0


class Leg:
    """One registration being served.

    Owner: courier. Lifetime: from Register until its machine is terminal, which `closed` is told exactly once.
    """

    def __init__(
        self,
        host: HandoffHost,
        link: Link,
        registration: Registration,
        source: BlockSource,
        closed: Callable[["Leg", FailureReason | None], None],
    ) -> None:
        """Wait for the prefill."""
        now = host.now()
        config = host.config
        self.link = link
        self.registration = registration
        self.cancelled = False
        self._host = host
        self._source = source
        self._closed = closed
        self._tally = _Tally(now)
        wanted = Wanted(
            mode=registration.mode,
            spans=tuple(
                Span(index, group.first, group.end) for index, group in enumerate(registration.groups)
            ),
            num_tokens=registration.num_tokens,
            digest=registration.digest,
            verify=registration.verify,
        )
        limits = ProducerLimits(
            park_s=config.park_s,
            received_s=config.lease_s,
            max_in_flight=config.max_in_flight,
            stream=config.stream,
            num_regions=len(host.layout.regions),
        )
        self.producer = Producer(wanted, host.layout.groups, limits, now)
        self._drive: Drive[ProducerState] = Drive(self.producer, self._perform, host.now)

    @property
    def num_in_flight(self) -> int:
        """Transfers posted and not ended."""
        return self.producer.num_in_flight

    @property
    def is_open(self) -> bool:
        """Whether the machine can still do something."""
        return self.producer.state not in TERMINAL

    def feed(self, event: Event) -> None:
        """Give the machine an event; an error of ours ends this leg only."""
        if isinstance(event, events.CancelArrived):
            self.cancelled = True
        try:
            self._drive.feed(event)
        except Exception:  # noqa: BLE001  # one leg's bug must not reach another or the engine
            _log.exception("sending %s met an internal error", self.registration.key.transfer_id)
            self._contain()

    def _contain(self) -> None:
        if not self.is_open:
            return
        try:
            self._drive.feed(
                events.PrefillLost(FailureReason.INTERNAL, "internal error, see the producer's log")
            )
        except Exception:  # noqa: BLE001  # it stays open and its blocks stay held: leaking is safe, freeing is not
            _log.exception("sending %s cannot be ended", self.registration.key.transfer_id)

    def _perform(self, effect: Effect) -> None:
        key = key_to_wire(self.registration.key)
        match effect:
            case effects.PostWrite():
                self._write(effect)
            case effects.AnnounceTotal():
                self.link.send(m.Progress(key, effect.total, effect.total))
            case effects.Seal():
                self._tally.last = self._tally.last or self._host.now()
                self.link.send(m.Sealed(key, effect.total, self._checksums()))
            case effects.MakeOffer():
                self._tally.matched = self._tally.first = self._tally.last = self._host.now()
                groups = [self._source.block_ids(span.group, span.start, span.end) for span in effect.spans]
                self.link.send(
                    m.Offer(key, effect.seq, blocks_to_wire(groups), last=True, checksums=self._checksums())
                )
            case effects.SendConfirmed():
                self.link.send(m.Confirmed(key))
            case effects.SendFailed():
                self.link.send(m.Failed(key, effect.reason.value, effect.detail[:4000]))
            case effects.SendCancelled():
                self.link.send(m.Cancelled(key))
            case effects.LegClosed():
                self._host.observer.record(self._record(effect.reason))
                self._closed(self, effect.reason)
            case Unexpected():
                self._host.observer.unexpected(f"{effect.event} in {effect.state}")

    def _write(self, effect: effects.PostWrite) -> None:
        tally, started = self._tally, self._host.now()
        tally.matched = tally.matched or started
        tally.first = tally.first or started
        key = key_to_wire(self.registration.key)
        ended = partial(self._write_ended, effect.seq)
        try:
            plan = plan_transfer(
                self._host.layout,
                self.link.layout,
                [self._pairs(span) for span in effect.spans],
                slice(effect.first_region, effect.end_region),
            )
        except KvbatonError as error:
            ended(False, str(error))
            return
        tally.transfers += 1
        tally.descriptors += plan.num_ranges
        tally.bytes += plan.num_bytes
        if self._source.ended_at is None:
            tally.streamed_bytes += plan.num_bytes
        if effect.end_region - effect.first_region < len(self._host.layout.regions):
            tally.tail_transfers += 1
        self.link.send(m.Progress(key, effect.seq + 1, effect.total))
        notification = m.encode(m.Written(key, effect.seq, effect.total))
        self._host.post(Operation.WRITE, self.link, plan, notification, ended, self._is_awaited)
        tally.post_s += self._host.now() - started

    def _is_awaited(self) -> bool:
        return not self.producer.may_send_more

    def _pairs(self, span: Span) -> BlockPairs:
        ours = self._source.block_ids(span.group, span.start, span.end)
        theirs = self.registration.groups[span.group].between(span.start, span.end)
        return BlockPairs(span.group, ours.ids, theirs)

    def _write_ended(self, seq: int, ok: bool, detail: str) -> None:
        self._tally.last = self._host.now()
        self.feed(events.TransferEnded(seq, ok, detail))

    def _checksums(self) -> bytes:
        if not self.registration.verify:
            return b""
        parts = []
        for span in self.producer.wanted.spans:
            if span.end > span.start:
                ids = self._source.block_ids(span.group, span.start, span.end).ids
                parts.append(self._host.checksum(span.group, np.ascontiguousarray(ids)))
        return b"".join(parts)

    def _record(self, reason: FailureReason | None) -> HandoffRecord:
        tally, now = self._tally, self._host.now()
        matched = tally.matched or now
        last = tally.last or now
        ended = self._source.ended_at
        return HandoffRecord(
            transfer_id=self.registration.key.transfer_id,
            request_id=self._source.request_name,
            side="producer",
            mode=self.registration.mode.value,
            outcome="committed" if reason is None else reason.value,
            tokens=self.registration.num_tokens,
            blocks=sum(int(group.ids.size) for group in self.registration.groups),
            bytes=tally.bytes,
            descriptors=tally.descriptors,
            transfers=tally.transfers,
            register_wait_s=max(0.0, matched - tally.registered),
            match_s=(tally.first or now) - matched,
            post_s=tally.post_s,
            wire_s=last - (tally.first or now),
            commit_s=now - last,
            tail_s=max(0.0, last - ended) if ended is not None else 0.0,
            streamed_bytes=tally.streamed_bytes,
            tail_transfers=tally.tail_transfers,
        )
