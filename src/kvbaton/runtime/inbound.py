"""Inbound: the handoffs this rank receives; performs what consumer machines ask."""

import logging
from dataclasses import dataclass, field
from functools import partial

from kvbaton.base.errors import FailureReason, KvbatonError, RemoteProtocolError
from kvbaton.base.ids import HandoffKey, RequestId
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.kv.plan import BlockPairs, plan_transfer
from kvbaton.protocol import effects, events
from kvbaton.protocol.consumer import TERMINAL, Consumer, ConsumerState
from kvbaton.protocol.machine import Effect, Event, Unexpected
from kvbaton.runtime.commands import CancelReceive, DeclineTransfer, StartReceive
from kvbaton.runtime.drive import Drive
from kvbaton.runtime.handoffs import HandoffHost
from kvbaton.runtime.link import Link
from kvbaton.runtime.observe import HandoffRecord
from kvbaton.transport.base import Operation
from kvbaton.wire import messages as m
from kvbaton.wire.translate import blocks_from_wire, blocks_to_wire, key_from_wire, key_to_wire

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Times:
    """Seconds on the courier's clock, for the record."""

    start: float
    registered: float | None = None
    first: float | None = None
    last: float | None = None
    post_s: float = 0.0


@dataclass(slots=True)
class Intake:
    """One handoff being received."""

    order: StartReceive
    link: Link
    consumer: Consumer
    times: _Times
    drive: Drive[ConsumerState] = field(init=False)
    num_posted: int = 0
    announced: int = 0
    arrived: int = 0
    descriptors: int = 0
    bytes: int = 0
    checksums: int = 0

    @property
    def expects_data(self) -> bool:
        """Whether announced WRITEs have not all arrived."""
        return self.arrived < self.announced


class Inbound:
    """All handoffs this rank receives.

    Owner: courier.
    """

    def __init__(self, host: HandoffHost) -> None:
        """Start with none."""
        self._host = host
        self._by_key: dict[HandoffKey, Intake] = {}
        self._by_request: dict[RequestId, Intake] = {}
        self._declines: dict[Link, dict[HandoffKey, float]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_quarantined(self) -> int:
        """Failed handoffs whose blocks a transfer may still write into."""
        waiting = (ConsumerState.QUARANTINED, ConsumerState.DRAINING)
        return sum(intake.consumer.state in waiting for intake in self._by_key.values())

    @property
    def expects_data(self) -> bool:
        """Whether bytes are known to be on their way to us."""
        return any(intake.expects_data for intake in self._by_key.values())

    # --- commands -----------------------------------------------------------------------------------------------------

    def start(self, order: StartReceive) -> None:
        """Begin a handoff; a request that cannot be served is answered at once."""
        if order.request_id in self._by_request:
            _log.error("request %s started to receive twice; the second order is ignored", order.request_id)
            return
        if order.key in self._by_key:
            self._host.report_received(order.request_id, f"{order.key.transfer_id} is being received already")
            return
        if len(order.groups) != len(self._host.layout.groups):
            self._host.report_received(order.request_id, "block lists do not match the KV cache groups")
            return
        now = self._host.now()
        link = self._host.dialled(order.address)
        consumer = Consumer(
            order.mode, order.groups, verify=self._host.config.verify, ttl_s=order.ttl_s, now=now
        )
        intake = Intake(order, link, consumer, _Times(now))
        intake.drive = Drive(consumer, partial(self._perform, intake), self._host.now)
        self._by_key[order.key] = intake
        self._by_request[order.request_id] = intake
        if link.peer.ready:
            self.feed(intake, events.PeerReady())

    def cancel(self, command: CancelReceive) -> None:
        """The request was aborted; unknown ones have ended already."""
        intake = self._by_request.get(command.request_id)
        if intake is not None:
            self.feed(intake, events.Abort())

    def decline(self, command: DeclineTransfer) -> None:
        """Tell a producer that nobody will come, when it can be told."""
        self._decline(self._host.dialled(command.address), command.key)

    def _decline(self, link: Link, key: HandoffKey) -> None:
        if link.peer.ready:
            link.send(m.Release(key_to_wire(key)))
        else:
            self._declines.setdefault(link, {})[key] = self._host.now() + self._host.config.lease_s

    # --- events -------------------------------------------------------------------------------------------------------

    def feed(self, intake: Intake, event: Event) -> None:
        """Give one handoff an event; an error of ours in it fails this handoff only."""
        try:
            intake.drive.feed(event)
        except Exception:  # noqa: BLE001  # one handoff's bug must not reach another or the engine
            _log.exception("handoff %s met an internal error", intake.order.key.transfer_id)
            self._contain(intake)

    def _contain(self, intake: Intake) -> None:
        if intake.consumer.state in TERMINAL:
            self._forget(intake)
            return
        try:
            intake.drive.feed(events.Abort())
        except Exception:  # noqa: BLE001  # its blocks stay quarantined: leaking them is safe, giving them back is not
            _log.exception("handoff %s cannot be ended; its blocks stay unused", intake.order.key.transfer_id)

    def rehome(self, old: Link) -> None:
        """Its peer is dead: handoffs it never heard of may still be served by whoever answers at that address now."""
        for intake in self._by_key.values():
            if intake.link is old and intake.consumer.state is ConsumerState.CONNECTING:
                intake.link = self._host.dialled(intake.order.address)

    def on_peer(self, link: Link, event: Event) -> None:
        """Tell every handoff of this link."""
        for intake in [each for each in self._by_key.values() if each.link is link]:
            if (
                isinstance(event, events.PeerUnreachable)
                and intake.consumer.state is not ConsumerState.CONNECTING
            ):
                continue
            self.feed(intake, event)
        if isinstance(event, events.PeerReady):
            for key in self._declines.pop(link, {}):
                link.send(m.Release(key_to_wire(key)))
        elif isinstance(event, events.PeerDead):
            self._declines.pop(link, None)

    def on_message(self, link: Link, message: m.AnyMessage) -> bool:
        """Handle a producer's message; False if it is none."""
        event: Event
        match message:
            case m.Progress():
                intake = self._find(link, message.key, "Progress")
                if intake is not None:
                    intake.announced = max(intake.announced, message.posted)
                    if message.total is not None:
                        self.feed(intake, events.TotalArrived(message.total))
                return True
            case m.Sealed():
                event = events.SealedArrived(message.total, message.checksums)
            case m.Offer():
                event = events.OfferArrived(
                    message.seq, blocks_from_wire(message.groups), message.last, message.checksums
                )
            case m.Confirmed():
                event = events.ConfirmedArrived()
            case m.Failed():
                event = events.FailedArrived(_reason(message.reason), message.detail)
            case m.Cancelled():
                event = events.CancelledArrived()
            case _:
                return False
        intake = self._find(link, message.key, type(message).__name__)
        if intake is not None:
            self.feed(intake, event)
        return True

    def on_written(self, agent: str, payload: bytes) -> None:
        """A WRITE arrived."""
        try:
            written = m.decode_written(payload)
        except RemoteProtocolError as error:
            _log.warning("agent %s sent a notification that cannot be read: %s", agent, error)
            self._host.observer.unexpected("unreadable notification")
            return
        intake = self._by_key.get(key_from_wire(written.key))
        if intake is None or intake.link.agent != agent:
            self._host.observer.unexpected("notification of an unknown handoff")
            return
        now = self._host.now()
        intake.arrived += 1
        intake.times.first = intake.times.first or now
        intake.times.last = now
        self.feed(intake, events.WriteArrived(written.seq, written.total))

    def next_deadline(self) -> float | None:
        """Earliest deadline."""
        deadlines = [each.consumer.next_deadline() for each in self._by_key.values()]
        return min((each for each in deadlines if each is not None), default=None)

    def tick(self, now: float) -> None:
        """Deliver deadlines that have passed."""
        for intake in list(self._by_key.values()):
            deadline = intake.consumer.next_deadline()
            if deadline is not None and deadline <= now:
                self.feed(intake, events.DeadlinePassed())
        for link, keys in list(self._declines.items()):
            self._declines[link] = {key: until for key, until in keys.items() if until > now}
            if not self._declines[link]:
                del self._declines[link]

    def uses(self, link: Link) -> bool:
        """Whether a handoff or an unsent decline needs this link."""
        return link in self._declines or any(each.link is link for each in self._by_key.values())

    def _find(self, link: Link, key: m.Key, what: str) -> Intake | None:
        intake = self._by_key.get(key_from_wire(key))
        if intake is None or intake.link is not link:
            self._host.observer.unexpected(f"{what} of an unknown handoff")
            return None
        return intake

    # --- effects ------------------------------------------------------------------------------------------------------

    def _perform(self, intake: Intake, effect: Effect) -> None:
        link, key = intake.link, key_to_wire(intake.order.key)
        match effect:
            case effects.SendRegister():
                intake.times.registered = self._host.now()
                link.send(self._registration(intake))
            case effects.SendReceived():
                link.send(m.Received(key))
            case effects.SendCancel():
                link.send(m.Cancel(key, effect.reason.value))
            case effects.Decline():
                self._decline(link, intake.order.key)
            case effects.PostRead():
                self._read(intake, effect)
            case effects.CheckBlocks():
                self._check(intake, effect.checksums)
            case effects.Quarantined():
                _log.warning(
                    "%s: the blocks of %s are quarantined: %s",
                    link.name,
                    intake.order.request_id,
                    effect.reason,
                )
                self._host.report_quarantined(intake.order.request_id, effect.reason.value)
            case effects.Commit():
                self._end(intake, None, "")
            case effects.Fail():
                self._end(intake, effect.reason, effect.detail)
            case Unexpected():
                self._host.observer.unexpected(f"{effect.event} in {effect.state}")

    def _registration(self, intake: Intake) -> m.Register:
        order = intake.order
        return m.Register(
            key=key_to_wire(order.key),
            mode=order.mode.value,
            num_tokens=order.num_tokens,
            prompt_digest=order.digest,
            groups=blocks_to_wire(order.groups),
            ttl_s=order.ttl_s,
            verify=self._host.config.verify,
        )

    def _read(self, intake: Intake, effect: effects.PostRead) -> None:
        started = self._host.now()
        intake.times.first = intake.times.first or started
        ended = partial(self._read_ended, intake, effect.seq)
        try:
            pairs = [
                BlockPairs(index, ours.between(theirs.first, theirs.end), theirs.ids)
                for index, (ours, theirs) in enumerate(zip(intake.order.groups, effect.groups, strict=True))
                if theirs.ids.size
            ]
            plan = plan_transfer(self._host.layout, intake.link.layout, pairs)
        except KvbatonError as error:
            ended(False, str(error))
            return
        intake.num_posted += 1
        intake.descriptors += plan.num_ranges
        intake.bytes += plan.num_bytes
        self._host.post(Operation.READ, intake.link, plan, b"", ended, lambda: True)
        intake.times.post_s += self._host.now() - started

    def _read_ended(self, intake: Intake, seq: int, ok: bool, detail: str) -> None:
        intake.times.last = self._host.now()
        self.feed(intake, events.ReadEnded(seq, ok, detail))

    def _check(self, intake: Intake, expected: bytes) -> None:
        found = b"".join(
            self._host.checksum(index, group.ids)
            for index, group in enumerate(intake.order.groups)
            if group.ids.size
        )
        if found == expected:
            intake.checksums = len(found) // 4
            self.feed(intake, events.Checked(ok=True))
            return
        detail = f"{len(found) // 4} checksums computed, {len(expected) // 4} received"
        if len(found) == len(expected):
            differing = [i // 4 for i in range(0, len(found), 4) if found[i : i + 4] != expected[i : i + 4]]
            detail = f"{len(differing)} of {len(found) // 4} block checksums differ, first at position {differing[0]}"
        _log.error("handoff %s is corrupt: %s", intake.order.key.transfer_id, detail)
        self.feed(intake, events.Checked(ok=False, detail=detail))

    def _end(self, intake: Intake, reason: FailureReason | None, detail: str) -> None:
        self._forget(intake)
        self._host.report_received(
            intake.order.request_id,
            None if reason is None else f"{reason.value}: {detail}" if detail else reason.value,
        )
        self._host.observer.record(self._record(intake, reason))

    def _forget(self, intake: Intake) -> None:
        self._by_key.pop(intake.order.key, None)
        self._by_request.pop(intake.order.request_id, None)

    def _record(self, intake: Intake, reason: FailureReason | None) -> HandoffRecord:
        times, now = intake.times, self._host.now()
        registered = times.registered or now
        return HandoffRecord(
            transfer_id=intake.order.key.transfer_id,
            request_id=intake.order.request_id,
            side="consumer",
            mode=intake.order.mode.value,
            outcome="committed" if reason is None else reason.value,
            tokens=intake.order.num_tokens,
            blocks=sum(int(group.ids.size) for group in intake.order.groups),
            bytes=_wanted_bytes(self._host, intake.order.groups),
            descriptors=intake.descriptors,
            transfers=intake.arrived or intake.num_posted,
            register_wait_s=registered - times.start,
            match_s=(times.first or now) - registered,
            post_s=times.post_s,
            wire_s=(times.last or now) - (times.first or now),
            commit_s=now - (times.last or now),
            tail_s=0.0,
            streamed_bytes=0,
            tail_transfers=0,
            checksums=intake.checksums,
        )


def _wanted_bytes(host: HandoffHost, groups: tuple[GroupBlocks, ...]) -> int:
    return sum(
        int(group.ids.size) * host.layout.group_block_bytes(index) for index, group in enumerate(groups)
    )


def _reason(text: str) -> FailureReason:
    """A peer's reason in our words; a newer peer may know one that we do not."""
    try:
        return FailureReason(text)
    except ValueError:
        return FailureReason.PROTOCOL
