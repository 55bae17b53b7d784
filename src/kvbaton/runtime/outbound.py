"""Outbound: the prefills this rank can hand off, their leases, and who has registered for them."""

import logging

import numpy as np

from kvbaton.base.errors import FailureReason, RemoteProtocolError
from kvbaton.base.ids import HandoffKey, RequestId
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol import effects, events
from kvbaton.protocol.lease import Lease
from kvbaton.protocol.machine import Effect, Event
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.producer import ProducerState
from kvbaton.runtime.commands import (
    PrefillAborted,
    PrefillFinished,
    PrefillPreempted,
    PrefillProgress,
    PrefillStarted,
    PrefillTail,
)
from kvbaton.runtime.drive import Drive
from kvbaton.runtime.handoffs import HandoffHost
from kvbaton.runtime.job import Job, JobKey, Memory
from kvbaton.runtime.leg import Leg, Registration, read_registration
from kvbaton.runtime.link import Link
from kvbaton.wire import messages as m
from kvbaton.wire.translate import key_from_wire

_log = logging.getLogger(__name__)


class Outbound:
    """All prefills this rank can hand off.

    Owner: courier.
    """

    def __init__(self, host: HandoffHost) -> None:
        """Start with none."""
        self._host = host
        self._jobs: dict[JobKey, Job] = {}
        self._by_request: dict[RequestId, Job] = {}
        self._gone: Memory[JobKey, FailureReason] = Memory()  # ended jobs, and releases that came early
        self._cancelled: Memory[HandoffKey, FailureReason] = Memory()  # cancelled before they were known

    @property
    def num_legs(self) -> int:
        """Registrations being served or parked."""
        return sum(len(job.legs) for job in self._jobs.values())

    @property
    def num_leases(self) -> int:
        """Prefills known here."""
        return len(self._by_request)

    @property
    def has_sealed(self) -> bool:
        """Whether a consumer's last word is still to come.

        Until then it may be reading our blocks, which software transports serve only while we poll, or our last notification may
        still be leaving, which takes polls of ours too.
        """
        return any(
            leg.producer.state is ProducerState.SEALED for job in self._jobs.values() for leg in job.legs
        )

    # --- commands -----------------------------------------------------------------------------------------------------

    def started(self, command: PrefillStarted) -> None:
        """A prefill begins; registrations may have been waiting for it."""
        key = (command.key.transfer_id, command.key.child)
        job = self._jobs.setdefault(key, Job(key))
        if job.lease is not None:
            _log.error("transfer_id %s is used by two prefills; the second cannot be handed off", key[0])
            return
        job.request_id, job.num_tokens, job.digest = command.request_id, command.num_tokens, command.digest
        job.tables = [GroupBlocks(0, np.empty(0, np.int64)) for _ in self._host.layout.groups]
        job.lease = Lease(ttl_s=self._host.config.lease_s)
        job.drive = Drive(job.lease, lambda effect: self._perform(job, effect), self._host.now)
        self._by_request[command.request_id] = job
        for leg in job.legs:
            self._feed_lease(job, _opened(leg))
        gone = self._gone.pop(key)
        job.is_spent = gone is FailureReason.ALREADY_CLAIMED
        if job.is_spent or gone is FailureReason.RELEASED:
            self._feed_lease(job, events.ReleaseAsked())

    def progressed(self, command: PrefillProgress) -> None:
        """More of a prefill is final."""
        job = self._by_request.get(command.request_id)
        if job is None:
            return
        self._extend(job, command.groups)
        self._measure(job, command.final_tokens)
        if command.ended and job.ended_at is None:
            job.ended_at = self._host.now()
        self._move_frontier(job, command.final_tokens, ended=command.ended)

    def tail(self, command: PrefillTail) -> None:
        """More layers of the running step's tokens are final."""
        job = self._by_request.get(command.request_id)
        if job is None:
            return
        self._extend(job, command.groups)
        if job.ended_at is None:
            final = 0 if job.frontier is None else job.frontier.final_tokens
            tail = events.Tail(command.num_regions, command.final_tokens, command.ended)
            self._move_frontier(job, final, ended=False, tail=tail)

    def _extend(self, job: Job, groups: tuple[GroupBlocks, ...]) -> None:
        for index, group in enumerate(groups):
            table = job.tables[index]
            if not group.ids.size:
                continue
            if group.first != table.end:
                raise RemoteProtocolError(
                    f"group {index} of {job.request_id}: blocks continue at {group.first}, {table.end} are known"
                )
            job.tables[index] = GroupBlocks(0, np.concatenate((table.ids, group.ids)))

    def _measure(self, job: Job, final_tokens: int) -> None:
        """How fast KV comes into being here, from one step of a prompt to its next."""
        now = self._host.now()
        if job.progressed_at is not None and job.frontier is not None:
            num_tokens = final_tokens - job.frontier.final_tokens
            self._host.speed.computed(num_tokens * self._host.layout.token_bytes, now - job.progressed_at)
        job.progressed_at = now

    def _move_frontier(
        self, job: Job, final_tokens: int, *, ended: bool, tail: events.Tail | None = None
    ) -> None:
        job.frontier = events.Frontier(
            final_tokens=final_tokens,
            ended=ended,
            num_blocks=tuple(table.end for table in job.tables),
            digest=job.digest,
            num_tokens=job.num_tokens,
            tail=tail,
        )
        for leg in list(job.legs):
            leg.feed(job.frontier)

    def finished(self, command: PrefillFinished) -> None:
        """The scheduler holds the blocks."""
        job = self._by_request.get(command.request_id)
        if job is None:
            self._host.report_sent(command.request_id)
            return
        self._feed_lease(job, events.Finished())

    def aborted(self, command: PrefillAborted) -> None:
        """No usable KV will come."""
        job = self._by_request.get(command.request_id)
        if job is not None:
            self._feed_lease(job, events.Aborted(command.held))
            return
        if command.held:
            self._host.report_sent(command.request_id)
        key = (command.key.transfer_id, command.key.child)
        self._gone.put(key, FailureReason.PREFILL_ABORTED)
        waiting = self._jobs.get(key)
        if waiting is not None and waiting.lease is None:
            for leg in list(waiting.legs):
                leg.feed(
                    events.PrefillLost(
                        FailureReason.PREFILL_ABORTED, "the prefill was aborted before it started"
                    )
                )

    def preempted(self, command: PrefillPreempted) -> None:
        """The blocks are about to be reused."""
        job = self._by_request.get(command.request_id)
        if job is None:
            return
        job.tables = [GroupBlocks(0, np.empty(0, np.int64)) for _ in job.tables]
        job.frontier = None
        job.ended_at = job.progressed_at = None
        for leg in list(job.legs):
            leg.feed(events.Preempted())

    def is_quiet(self, request_ids: frozenset[RequestId]) -> bool:
        """Whether no transfer reads these prefills' blocks."""
        jobs = (self._by_request.get(request_id) for request_id in request_ids)
        return all(job is None or job.num_in_flight == 0 for job in jobs)

    # --- messages -----------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: m.AnyMessage) -> bool:
        """Handle a consumer's message; False if it is none."""
        match message:
            case m.Register():
                self._register(link, message)
            case m.Received():
                leg = self._find(link, key_from_wire(message.key))
                if leg is None:
                    # a pull must learn that its blocks were not held; a push has committed already and ignores this
                    link.send(
                        m.Failed(
                            message.key, FailureReason.LEASE_EXPIRED.value, "the blocks are no longer held"
                        )
                    )
                else:
                    leg.feed(events.ReceivedArrived())
            case m.Cancel():
                leg = self._find(link, key_from_wire(message.key))
                if leg is None:
                    # its Register may still be unread on an older connection, and serving that would write into freed blocks
                    self._cancelled.put(key_from_wire(message.key), _reason(message.reason))
                    link.send(m.Cancelled(message.key))
                else:
                    leg.feed(events.CancelArrived(_reason(message.reason)))
            case m.Release():
                self._release(key_from_wire(message.key))
            case _:
                return False
        return True

    def _register(self, link: Link, message: m.Register) -> None:
        try:
            registration = read_registration(link, message, len(self._host.layout.groups))
        except RemoteProtocolError as error:
            link.send(m.Failed(message.key, FailureReason.INCOMPATIBLE.value, str(error)[:4000]))
            return
        refusal = self._refusal(link, registration)
        if refusal is not None:
            self._host.observer.unexpected(f"registration refused: {refusal}")
            link.send(m.Failed(message.key, refusal.value, "registration refused"))
            return
        self._host.speed.is_pushed = registration.mode is Mode.PUSH
        key = (registration.key.transfer_id, registration.key.child)
        job = self._jobs.setdefault(key, Job(key))
        if registration.key.epoch > job.epoch:
            job.epoch = registration.key.epoch
            for old in [leg for leg in job.legs if leg.registration.key.epoch < job.epoch]:
                old.feed(
                    events.PrefillLost(FailureReason.STALE_EPOCH, "a newer registration replaced this one")
                )
        # feeding may have ended the job; a registration revives it, and takes an early release back
        job = self._jobs.setdefault(key, job)
        self._gone.pop(key)
        leg = Leg(
            self._host, link, registration, job, lambda each, reason: self._leg_closed(job, each, reason)
        )
        job.legs.append(leg)
        if job.lease is not None:
            self._feed_lease(job, _opened(leg))
            if job.frontier is not None:
                leg.feed(job.frontier)
        else:
            # its prefill has most likely reached our engine too, which looks for it between steps only
            self._host.rouse_engine()

    def _refusal(self, link: Link, registration: Registration) -> FailureReason | None:
        if registration.key in self._cancelled:
            return FailureReason.ABORTED
        key = (registration.key.transfer_id, registration.key.child)
        job = self._jobs.get(key)
        if job is None:
            gone = self._gone.get(key)
            return None if gone is None or gone is FailureReason.RELEASED else gone
        if job.is_spent:
            return FailureReason.ALREADY_CLAIMED
        if registration.key.epoch < job.epoch:
            return FailureReason.STALE_EPOCH
        if job.lease is not None and not job.lease.accepts_legs:
            return FailureReason.ALREADY_CLAIMED
        same = [
            leg for leg in job.legs if leg.is_open and leg.registration.key.epoch == registration.key.epoch
        ]
        if len(same) >= registration.fan_out or any(leg.link.is_same_process(link) for leg in same):
            return FailureReason.ALREADY_CLAIMED
        return None

    def _release(self, key: HandoffKey) -> None:
        job = self._jobs.get((key.transfer_id, key.child))
        if job is not None and job.lease is not None:
            self._feed_lease(job, events.ReleaseAsked())
        elif (key.transfer_id, key.child) not in self._gone:
            self._gone.put((key.transfer_id, key.child), FailureReason.RELEASED)

    # --- events -------------------------------------------------------------------------------------------------------

    def on_peer(self, link: Link, event: Event) -> None:
        """Tell every leg of this link."""
        for leg in [leg for job in self._jobs.values() for leg in job.legs if leg.link is link]:
            leg.feed(event)

    def next_deadline(self) -> float | None:
        """Earliest deadline."""
        deadlines = [leg.producer.next_deadline() for job in self._jobs.values() for leg in job.legs]
        deadlines += [job.lease.next_deadline() for job in self._jobs.values() if job.lease is not None]
        return min((each for each in deadlines if each is not None), default=None)

    def tick(self, now: float) -> None:
        """Deliver deadlines that have passed."""
        for job in list(self._jobs.values()):
            for leg in list(job.legs):
                if _is_due(leg.producer.next_deadline(), now):
                    leg.feed(events.DeadlinePassed())
            if job.lease is not None and _is_due(job.lease.next_deadline(), now):
                self._feed_lease(job, events.DeadlinePassed())

    def uses(self, link: Link) -> bool:
        """Whether a leg needs this link."""
        return any(leg.link is link for job in self._jobs.values() for leg in job.legs)

    def close_all(self) -> None:
        """Give up everything; what is in flight is waited for by the caller."""
        for job in list(self._jobs.values()):
            for leg in list(job.legs):
                leg.feed(events.PrefillLost(FailureReason.PEER_LOST, "the producer is shutting down"))

    def _find(self, link: Link, key: HandoffKey) -> Leg | None:
        job = self._jobs.get((key.transfer_id, key.child))
        for leg in job.legs if job is not None else ():
            if leg.link.is_same_process(link) and leg.registration.key == key:
                leg.link = link  # after a reset the answer has to go where the question came from
                return leg
        return None

    # --- endings ------------------------------------------------------------------------------------------------------

    def _feed_lease(self, job: Job, event: Event) -> None:
        if job.drive is not None:
            job.drive.feed(event)

    def _perform(self, job: Job, effect: Effect) -> None:
        match effect:
            case effects.CloseLegs():
                for leg in list(job.legs):
                    leg.feed(events.PrefillLost(effect.reason, "the producer gave the prefill up"))
            case effects.Free():
                self._forget(job, effect.reason)
                if effect.report and job.request_id is not None:
                    self._host.report_sent(job.request_id)
                if effect.reason is FailureReason.LEASE_EXPIRED:
                    _log.warning("nobody fetched the KV of %s within its lease; it was freed", job.request_id)

    def _leg_closed(self, job: Job, leg: Leg, reason: FailureReason | None) -> None:
        job.legs.remove(leg)
        if job.lease is None:
            if not job.legs:
                self._forget(job, reason)
        elif reason is None:
            self._feed_lease(job, events.LegReceived())
        elif leg.cancelled:
            self._feed_lease(job, events.LegDeclined())
        else:
            self._feed_lease(job, events.LegLost())

    def _forget(self, job: Job, reason: FailureReason | None) -> None:
        self._jobs.pop(job.key, None)
        if job.request_id is not None:
            self._by_request.pop(job.request_id, None)
        if job.lease is not None:
            if job.is_spent:
                reason = None
            elif reason is FailureReason.RELEASED:
                reason = (
                    FailureReason.LEASE_EXPIRED
                )  # it has been and gone; RELEASED stands for one yet to come
            self._gone.put(job.key, reason or FailureReason.ALREADY_CLAIMED)
        elif reason is not None and reason is not FailureReason.UNKNOWN_TRANSFER:
            # a consumer that gave up before the prefill came will not come back for it
            self._gone.put(job.key, FailureReason.RELEASED)


def _opened(leg: Leg) -> events.LegOpened:
    return events.LegOpened(leg.registration.fan_out, leg.registration.key.epoch)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now


def _reason(text: str) -> FailureReason:
    try:
        return FailureReason(text)
    except ValueError:
        return FailureReason.PROTOCOL
