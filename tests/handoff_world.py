"""Handoff world: one prefill, its lease and several consumers over faulty links, with memory modelled block by block.

The world is a small pure shell: it performs the effects of the real machines, and everything that a network, a data plane, a
scheduler and an operating system may do is an operation that a test picks from `operations()`. What must hold is asserted at the
moment it could break, so a failing run ends at the step that went wrong.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.kv.layout import Group, GroupKind
from kvbaton.protocol import consumer as consuming
from kvbaton.protocol import effects, events
from kvbaton.protocol import producer as producing
from kvbaton.protocol.consumer import Consumer, ConsumerState
from kvbaton.protocol.effects import Span
from kvbaton.protocol.lease import Lease, LeaseState
from kvbaton.protocol.machine import Effect, Event, Unexpected
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.producer import Producer, ProducerLimits, Wanted

Content = tuple[object, ...]
Step = Callable[[], None]
TTL_S, PARK_S, LEASE_S, RECEIVED_S = 30.0, 20.0, 12.0, 8.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world is made of.

    Attributes:
        mode: who posts.
        verify: whether checksums are compared.
        stream: whether blocks go out before the prefill has ended.
        max_in_flight: WRITEs at once per leg.
        num_tokens: of the prompt.
        epochs: one consumer per entry; equal epochs are ranks of one engine (fan-out), newer ones retarget.
        first_shares: per consumer, which share of its blocks a prefix cache already has, in quarters.
        hardware: whether bytes move while a process is frozen.
        seed: for orders nobody chooses.
    """

    mode: Mode = Mode.PUSH
    verify: bool = False
    stream: bool = True
    max_in_flight: int = 2
    num_tokens: int = 40
    epochs: tuple[int, ...] = (0,)
    first_shares: tuple[int, ...] = (0,)
    hardware: bool = False
    seed: int = 0


@dataclass(eq=False)
class Connection:
    """One TCP connection between a consumer and the producer.

    Attributes:
        to_producer, to_consumer: what was sent and not yet read.
        broken: nothing can be sent any more; what arrived may still be read.
        seen: what the producer takes the other end for: ready, silent or dead.
    """

    to_producer: deque[tuple[object, ...]] = field(default_factory=deque)
    to_consumer: deque[Event] = field(default_factory=deque)
    broken: bool = False
    seen: str = "ready"


@dataclass(eq=False)
class Transfer:
    """Bytes on their way: block by block, in any order, at any time up to its end."""

    pair: "Pair"
    write: bool
    seq: int
    total: int | None
    moves: list[tuple[int, int, int, int]]  # region, block index, producer's block, consumer's block
    state: str = "moving"  # then landed or failed, then reported


@dataclass(eq=False)
class Pair:
    """One consumer rank and what the producer keeps for it."""

    name: int
    epoch: int
    fan_out: int
    wanted: tuple[GroupBlocks, ...]
    consumer: Consumer | None = None
    view: str = "connecting"  # the producer as the consumer sees it: then ready, silent, probing or dead
    connections: list[Connection] = field(default_factory=list)
    memory: dict[tuple[int, int], Content] = field(default_factory=dict)
    notifications: list[tuple[int, int | None]] = field(default_factory=list)
    outcome: Effect | None = None
    declined: bool = False
    alive: bool = True
    frozen: bool = False
    leg: Producer | None = None
    leg_connection: Connection | None = None
    leg_cancelled: bool = False
    num_closed: int = 0
    known: bool = False  # the producer has seen this key and opens no second leg for it

    @property
    def works(self) -> bool:
        """Whether its process runs and has something to do."""
        return self.alive and not self.frozen and self.consumer is not None and self.outcome is None

    @property
    def connection(self) -> Connection:
        """The one its process uses."""
        return self.connections[-1]


class World:
    """Everything around the machines. `operations(faults=...)` lists what may happen next."""

    groups = (Group(GroupKind.ATTENTION, 8), Group(GroupKind.STATE, 1024), Group(GroupKind.ATTENTION, 16))
    regions = (0, 1, 2, 0, 2)  # the group of each, in layer order

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.random = Random(setup.seed)
        self.log: list[str] = []
        self.transfers: list[Transfer] = []
        self.producer_alive = True
        self.producer_frozen = False
        self.may_start = True
        # the prefill: unknown, running, ended (computed), held (finished or aborted) or gone
        self.stage = "unknown"
        self.lease: Lease | None = None
        self.lease_events: deque[Event] = deque()
        self.frees: list[effects.Free] = []
        self.final_tokens = 0
        self.tail = 0  # regions that the running step has finished
        self.tail_tokens = 0  # final in these regions
        self.tables: list[list[int]] = [[] for _ in self.groups]
        self.taken: list[tuple[int, int]] = []  # preempted blocks, to be overwritten once quiet
        self.memory: dict[tuple[int, int], Content] = {}
        self.next_block = 0
        self.frontier: events.Frontier | None = None
        self.epoch = 0
        self.pairs = [self._pair(index, epoch) for index, epoch in enumerate(setup.epochs)]

    def _pair(self, index: int, epoch: int) -> Pair:
        wanted, memory = [], {}
        for number, group in enumerate(self.groups):
            total = -(-self.setup.num_tokens // group.block_tokens)
            first = total * self.setup.first_shares[index] // 4
            ids = self.random.sample(range(100, 200), total - first)
            wanted.append(group_blocks(first, ids))
            memory.update({(region, each): ("old",) for region in self._regions_of(number) for each in ids})
        return Pair(index, epoch, self.setup.epochs.count(epoch), tuple(wanted), memory=memory)

    def final(self, region: int, index: int) -> Content:
        """What a block holds in one region when it cannot change any more."""
        return ("kv", region, index)

    def _regions_of(self, number: int) -> list[int]:
        return [region for region, group in enumerate(self.regions) if group == number]

    # --- what may happen ----------------------------------------------------------------------------------------------

    def operations(self, *, faults: bool) -> list[tuple[str, Step]]:
        """All that may happen now; without faults only what a healthy world does by itself."""
        found = list(self._prefill_steps(faults=faults)) + list(self._due())
        for pair in self.pairs:
            found += self._consumer_steps(pair, faults=faults)
            found += self._producer_steps(pair, faults=faults)
        for transfer in self.transfers:
            found += self._data_steps(transfer, faults=faults)
        if faults:
            found += self._catastrophes()
        return found

    def do(self, operation: tuple[str, Step]) -> None:
        """Let it happen."""
        self.log.append(operation[0])
        operation[1]()
        self._check()

    def happens(self, *names: str) -> None:
        """Let the first operation happen whose name starts like this, for each name in turn."""
        for name in names:
            found = self.operations(faults=False) + self.operations(faults=True)
            matching = [each for each in found if each[0].startswith(name)]
            assert matching, f"{name!r} cannot happen now, only {[each[0] for each in found]}"
            self.do(matching[0])

    def advance(self, seconds: float) -> None:
        """Let time pass; what falls due becomes an operation."""
        self.log.append(f"+{seconds:g} s")
        self.now += seconds

    # --- the prefill engine -------------------------------------------------------------------------------------------

    @property
    def producer_works(self) -> bool:
        return self.producer_alive and not self.producer_frozen

    def _prefill_steps(self, *, faults: bool) -> Iterator[tuple[str, Step]]:
        if not self.producer_works:
            return
        if self.stage == "unknown":
            if self.may_start:
                yield "prefill starts", self._start
            if faults:
                yield "prefill aborted before it started", self._abort_unknown
        elif self.taken:
            if all(pair.leg is None or not pair.leg.num_in_flight for pair in self.pairs):
                yield "preempted blocks are overwritten", self._overwrite_taken
        elif self.stage == "running":
            yield from self._compute_steps()
        elif self.stage == "ended":
            yield "prefill finishes", self._finish
        if faults and self.stage in ("running", "ended") and not self.taken:
            yield "prefill is preempted", self._preempt
            yield "prefill is aborted", self._abort
        if faults and self.lease is not None:
            yield "prefill is released", lambda: self._feed_lease(events.ReleaseAsked())

    def _compute_steps(self) -> Iterator[tuple[str, Step]]:
        if self.tail:
            yield "prefill computes the rest", lambda: self._compute(self.tail_tokens)
            for tail in range(self.tail + 1, len(self.regions) + 1):
                yield f"prefill is through region {tail}", lambda tail=tail: self._compute_tail(tail, 0)
            return
        for tokens in (5, 16):
            yield (
                f"prefill computes {tokens}",
                lambda tokens=tokens: self._compute(self.final_tokens + tokens),
            )
        yield "prefill computes the rest", lambda: self._compute(self.setup.num_tokens)
        for tail in range(1, len(self.regions) + 1):
            yield (
                f"prefill is through region {tail}",
                lambda tail=tail: self._compute_tail(tail, self.setup.num_tokens),
            )
            yield (
                f"prefill's step of 16 is through region {tail}",
                lambda tail=tail: self._compute_tail(tail, self.final_tokens + 16),
            )

    def _start(self) -> None:
        self.stage = "running"
        self.lease = Lease(ttl_s=LEASE_S)
        for pair in self.pairs:
            if pair.leg is not None:
                self._feed_lease(events.LegOpened(pair.fan_out))

    def _abort_unknown(self) -> None:
        self.stage = "gone"
        for pair in self.pairs:
            self._feed_leg(pair, events.PrefillLost(FailureReason.PREFILL_ABORTED))

    def _compute(self, tokens: int) -> None:
        self.final_tokens = min(self.setup.num_tokens, tokens)
        ended = self.final_tokens == self.setup.num_tokens
        self.tail = 0
        self._grow(self.final_tokens)
        self._fill(0, len(self.regions), self.final_tokens, ended=ended)
        if ended:
            self.stage = "ended"
        self._report_frontier(ended=ended)

    def _compute_tail(self, tail: int, tokens: int) -> None:
        """A step that reaches so many tokens is running; these regions are through."""
        if not self.tail:
            self.tail_tokens = min(self.setup.num_tokens, tokens)
            self._grow(self.tail_tokens)
        self._fill(self.tail, tail, self.tail_tokens, ended=self.tail_tokens == self.setup.num_tokens)
        self.tail = tail
        self._report_frontier(ended=False)

    def _grow(self, num_tokens: int) -> None:
        for number, group in enumerate(self.groups):
            table = self.tables[number]
            until = self.setup.num_tokens if group.kind is GroupKind.STATE else num_tokens
            while len(table) * group.block_tokens < until:
                table.append(self.next_block)
                for region in self._regions_of(number):
                    self.memory[region, self.next_block] = ("fresh",)
                self.next_block += 1

    def _fill(self, first: int, end: int, num_tokens: int, *, ended: bool) -> None:
        for region in range(first, end):
            group = self.groups[self.regions[region]]
            full = 0 if group.kind is GroupKind.STATE else num_tokens // group.block_tokens
            for index, block in enumerate(self.tables[self.regions[region]]):
                final = ended or index < full
                self.memory[region, block] = self.final(region, index) if final else ("part", num_tokens)

    def _report_frontier(self, *, ended: bool) -> None:
        self.frontier = events.Frontier(
            self.final_tokens,
            ended,
            tuple(map(len, self.tables)),
            b"digest",
            self.setup.num_tokens,
            events.Tail(self.tail, self.tail_tokens, self.tail_tokens == self.setup.num_tokens)
            if self.tail
            else None,
        )
        for pair in self.pairs:
            self._feed_leg(pair, self.frontier)

    def _finish(self) -> None:
        self.stage = "held"
        self._feed_lease(events.Finished())

    def _abort(self) -> None:
        assert self.lease is not None
        held = self.lease.num_legs > 0 or self.random.random() < 0.5
        self.stage = "held"
        self._feed_lease(events.Aborted(held))

    def _preempt(self) -> None:
        self.taken = self._held()
        self.tables = [[] for _ in self.groups]
        self.tail, self.final_tokens, self.frontier, self.stage = 0, 0, None, "running"
        for pair in self.pairs:
            self._feed_leg(pair, events.Preempted())

    def _held(self) -> list[tuple[int, int]]:
        return [
            (region, block) for region, number in enumerate(self.regions) for block in self.tables[number]
        ]

    def _overwrite_taken(self) -> None:
        self._overwrite(self.taken)
        self.taken = []

    def _overwrite(self, blocks: list[tuple[int, int]]) -> None:
        for transfer in self.transfers:
            if transfer.write and transfer.state == "moving":
                read = {(region, source) for region, _, source, _ in transfer.moves}
                assert not read & set(blocks), "S2: a block is reused while a WRITE reads it"
        for key in blocks:
            self.memory[key] = ("garbage",)

    # --- a consumer's process -----------------------------------------------------------------------------------------

    def _consumer_steps(self, pair: Pair, *, faults: bool) -> Iterator[tuple[str, Step]]:
        if pair.consumer is None and pair.alive and not pair.frozen:
            yield f"{pair.name}: arrives", lambda: self._arrive(pair)
        if not pair.works:
            return
        assert pair.consumer is not None
        yield from self._view_steps(pair, faults=faults)
        if pair.view in ("ready", "silent") and pair.connection.to_consumer:
            head = type(pair.connection.to_consumer[0]).__name__
            yield (
                f"{pair.name}: reads {head}",
                lambda: self._feed_consumer(pair, pair.connection.to_consumer.popleft()),
            )
            if faults:
                yield (
                    f"{pair.name}: reads {head} and will again",
                    lambda: self._feed_consumer(pair, pair.connection.to_consumer[0]),
                )
        for note in pair.notifications:
            yield (
                f"{pair.name}: notified of {note}",
                lambda note=note: self._notified(pair, note, again=False),
            )
            if faults:
                yield (
                    f"{pair.name}: notified of {note}, again later",
                    lambda note=note: self._notified(pair, note, again=True),
                )
        if pair.consumer.state is ConsumerState.CHECKING:
            yield f"{pair.name}: checks", lambda: self._checked(pair, spoil=False)
            if faults:
                yield f"{pair.name}: finds a wrong checksum", lambda: self._checked(pair, spoil=True)
        if faults:
            yield f"{pair.name}: aborts", lambda: self._feed_consumer(pair, events.Abort())

    def _view_steps(self, pair: Pair, *, faults: bool) -> Iterator[tuple[str, Step]]:
        """What its peer machine announces."""
        match pair.view:
            case "connecting" | "probing" if self.producer_works:
                yield f"{pair.name}: connects", lambda: self._connect(pair)
            case "probing" if not self.producer_alive:
                yield f"{pair.name}: peer is dead", lambda: self._peer_dead(pair)
            case "ready" if self.producer_frozen or faults:
                yield f"{pair.name}: peer is silent", lambda: self._turn(pair, "silent", events.PeerSilent())
            case "silent" if self.producer_works and not pair.connection.broken:
                yield f"{pair.name}: peer speaks", lambda: self._turn(pair, "ready", events.PeerReady())
        if pair.view == "connecting" and (faults or not self.producer_alive):
            yield (
                f"{pair.name}: peer unreachable",
                lambda: self._feed_consumer(pair, events.PeerUnreachable(FailureReason.PEER_UNREACHABLE, "")),
            )
        if pair.view in ("ready", "silent") and (pair.connection.broken or not self.producer_alive):
            yield f"{pair.name}: connection ended", lambda: self._connection_ended(pair)

    def _arrive(self, pair: Pair) -> None:
        pair.consumer = Consumer(
            self.setup.mode, pair.wanted, verify=self.setup.verify, ttl_s=TTL_S, now=self.now
        )

    def _connect(self, pair: Pair) -> None:
        if pair.connections:
            pair.connection.broken = True
        pair.connections.append(Connection())
        self._turn(pair, "ready", events.PeerReady())

    def _turn(self, pair: Pair, view: str, event: Event) -> None:
        pair.view = view
        self._feed_consumer(pair, event)

    def _connection_ended(self, pair: Pair) -> None:
        was_ready = pair.view == "ready"
        pair.connection.broken = True
        pair.view = "probing"
        if was_ready:
            self._feed_consumer(pair, events.PeerSilent())

    def _peer_dead(self, pair: Pair) -> None:
        """The shell has waited until nothing of a dead process arrives any more."""
        for transfer in self.transfers:
            if transfer.pair is pair and transfer.write:
                transfer.state = "reported"
        self._turn(pair, "dead", events.PeerDead())

    def _notified(self, pair: Pair, note: tuple[int, int | None], *, again: bool) -> None:
        if not again:
            pair.notifications.remove(note)
        self._feed_consumer(pair, events.WriteArrived(*note))

    def _checked(self, pair: Pair, *, spoil: bool) -> None:
        right = self._is_filled(pair)
        assert right or self.setup.mode is Mode.PULL, "S6: a push delivered wrong bytes"
        self._feed_consumer(pair, events.Checked(ok=right and not spoil))

    def _is_filled(self, pair: Pair) -> bool:
        return all(
            pair.memory[region, int(block)] == self.final(region, group.first + offset)
            for number, group in enumerate(pair.wanted)
            for region in self._regions_of(number)
            for offset, block in enumerate(group.ids)
        )

    def _feed_consumer(self, pair: Pair, event: Event) -> None:
        if pair.consumer is None or pair.consumer.state in consuming.TERMINAL:
            return
        for effect in pair.consumer.receive(event, self.now):
            self._perform_for_consumer(pair, effect)

    def _perform_for_consumer(self, pair: Pair, effect: Effect) -> None:
        match effect:
            case effects.SendRegister():
                self._say(pair, "register")
            case effects.SendReceived():
                self._say(pair, "received")
            case effects.SendCancel():
                self._say(pair, "cancel", effect.reason)
            case effects.Decline():
                pair.declined = True
            case effects.PostRead():
                moves = [
                    (region, index, int(source), int(target))
                    for number, (ours, theirs) in enumerate(zip(pair.wanted, effect.groups, strict=True))
                    for region in self._regions_of(number)
                    for index, source, target in zip(
                        range(theirs.first, theirs.end),
                        theirs.ids,
                        ours.between(theirs.first, theirs.end),
                        strict=True,
                    )
                ]
                self._post(Transfer(pair, False, effect.seq, None, moves))
            case effects.Commit() | effects.Fail():
                assert pair.outcome is None, "S3: a handoff ended twice"
                pair.outcome = effect
                if isinstance(effect, effects.Commit):
                    assert self._is_filled(pair), "S6: committed blocks do not hold the producer's KV"
            case effects.CheckBlocks() | effects.Quarantined() | Unexpected():
                pass
            case _:
                raise AssertionError(f"a consumer emitted {effect}")

    def _say(self, pair: Pair, *message: object) -> None:
        if pair.connections and not pair.connection.broken:
            pair.connection.to_producer.append(message)

    # --- the producer's courier ---------------------------------------------------------------------------------------

    def _producer_steps(self, pair: Pair, *, faults: bool) -> Iterator[tuple[str, Step]]:
        if not self.producer_works:
            return
        for connection in pair.connections:
            if connection.seen == "dead":
                continue
            if connection.to_producer:
                yield (
                    f"producer reads {connection.to_producer[0][0]} of {pair.name}",
                    lambda c=connection: self._hear(pair, c, c.to_producer.popleft()),
                )
                if faults:
                    yield (
                        f"producer reads {connection.to_producer[0][0]} of {pair.name}, again later",
                        (lambda c=connection: self._hear(pair, c, c.to_producer[0])),
                    )
            if connection.seen == "ready" and (faults or pair.frozen):
                yield (
                    f"producer: {pair.name} is silent",
                    lambda c=connection: self._see(pair, c, "silent", events.PeerSilent()),
                )
            if connection.seen == "silent" and pair.alive and not pair.frozen and not connection.broken:
                yield (
                    f"producer: {pair.name} speaks",
                    lambda c=connection: self._see(pair, c, "ready", events.PeerReady()),
                )
            if connection.broken or not pair.alive:
                yield (
                    f"producer: {pair.name} is gone",
                    lambda c=connection: self._see(pair, c, "dead", events.PeerDead()),
                )
        if pair.declined:
            yield f"producer hears that {pair.name} declines", lambda: self._declined(pair)

    def _see(self, pair: Pair, connection: Connection, seen: str, event: Event) -> None:
        connection.seen = seen
        if pair.leg_connection is connection:
            self._feed_leg(pair, event)

    def _declined(self, pair: Pair) -> None:
        pair.declined = False
        self._feed_lease(events.ReleaseAsked())

    def _hear(self, pair: Pair, connection: Connection, message: tuple[object, ...]) -> None:
        if connection.seen == "silent":
            self._see(pair, connection, "ready", events.PeerReady())
        match message:
            case ("register",):
                self._register(pair, connection)
            case ("received",):
                if pair.leg is None:
                    self._reply(pair, events.FailedArrived(FailureReason.LEASE_EXPIRED, "not held"))
                self._feed_leg(pair, events.ReceivedArrived())
            case ("cancel", FailureReason() as reason):
                pair.known = True
                if pair.leg is None:
                    self._reply(pair, events.CancelledArrived())
                    return
                pair.leg_cancelled = True
                self._feed_leg(pair, events.CancelArrived(reason))

    def _register(self, pair: Pair, connection: Connection) -> None:
        if pair.known:
            return
        pair.known = True
        if pair.epoch > self.epoch:
            self.epoch = pair.epoch
            for other in self.pairs:
                if other.epoch < self.epoch:
                    self._feed_leg(other, events.PrefillLost(FailureReason.STALE_EPOCH))
        refused = pair.epoch < self.epoch or self.stage == "gone"
        if refused or (self.lease is not None and not self.lease.accepts_legs):
            self._reply(pair, events.FailedArrived(FailureReason.ALREADY_CLAIMED, ""))
            return
        spans = tuple(Span(number, group.first, group.end) for number, group in enumerate(pair.wanted))
        limits = ProducerLimits(
            PARK_S, RECEIVED_S, self.setup.max_in_flight, self.setup.stream, len(self.regions)
        )
        wanted = Wanted(self.setup.mode, spans, self.setup.num_tokens, b"digest", self.setup.verify)
        pair.leg = Producer(wanted, self.groups, limits, self.now)
        pair.leg_connection = connection
        self._feed_lease(events.LegOpened(pair.fan_out))
        if self.frontier is not None:
            self._feed_leg(pair, self.frontier)

    def _reply(self, pair: Pair, event: Event) -> None:
        if not pair.connection.broken:
            pair.connection.to_consumer.append(event)

    def _feed_leg(self, pair: Pair, event: Event) -> None:
        if pair.leg is None:
            return
        leg = pair.leg
        for effect in leg.receive(event, self.now):
            self._perform_for_leg(pair, leg, effect)

    def _perform_for_leg(self, pair: Pair, leg: Producer, effect: Effect) -> None:
        match effect:
            case effects.PostWrite():
                moves = [
                    (
                        region,
                        index,
                        self.tables[span.group][index],
                        int(pair.wanted[span.group].between(index, index + 1)[0]),
                    )
                    for span in effect.spans
                    for region in self._regions_of(span.group)
                    if effect.first_region <= region < effect.end_region
                    for index in range(span.start, span.end)
                ]
                self._post(Transfer(pair, True, effect.seq, effect.total, moves))
            case effects.AnnounceTotal():
                self._reply(pair, events.TotalArrived(effect.total))
            case effects.Seal():
                self._reply(pair, events.SealedArrived(effect.total, b"crc"))
            case effects.MakeOffer():
                offered = tuple(
                    GroupBlocks(
                        span.start, np.asarray(self.tables[span.group][span.start : span.end], np.int64)
                    )
                    for span in effect.spans
                )
                self._reply(pair, events.OfferArrived(effect.seq, offered, True, b"crc"))
            case effects.SendConfirmed():
                self._reply(pair, events.ConfirmedArrived())
            case effects.SendFailed():
                self._reply(pair, events.FailedArrived(effect.reason, effect.detail))
            case effects.SendCancelled():
                self._reply(pair, events.CancelledArrived())
            case effects.LegClosed():
                assert leg.num_in_flight == 0, "a leg closed with a WRITE in flight"
                pair.num_closed += 1
                pair.leg = None
                if effect.reason is None:
                    self._feed_lease(events.LegReceived())
                else:
                    self._feed_lease(events.LegDeclined() if pair.leg_cancelled else events.LegLost())
            case Unexpected():
                pass
            case _:
                raise AssertionError(f"a producer emitted {effect}")

    def _feed_lease(self, event: Event) -> None:
        if self.lease is None or self.lease.state is LeaseState.ENDED:
            return
        self.lease_events.append(event)
        if len(self.lease_events) > 1:
            return
        while self.lease_events:
            for effect in self.lease.receive(self.lease_events[0], self.now):
                self._perform_for_lease(effect)
            self.lease_events.popleft()
            if self.lease.state is LeaseState.ENDED:
                assert not self.lease_events, "an event followed the end of a lease"

    def _perform_for_lease(self, effect: Effect) -> None:
        match effect:
            case effects.CloseLegs():
                for pair in self.pairs:
                    self._feed_leg(pair, events.PrefillLost(effect.reason))
            case effects.Free():
                assert not self.frees, "S3: freed twice"
                assert not any(pair.leg for pair in self.pairs), "S2: freed while a leg is open"
                self.frees.append(effect)
                self.stage = "gone"
                self._overwrite(self._held())
                self._overwrite_taken()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _post(self, transfer: Transfer) -> None:
        self.random.shuffle(transfer.moves)
        self.transfers.append(transfer)

    def _data_steps(self, transfer: Transfer, *, faults: bool) -> Iterator[tuple[str, Step]]:
        pair = transfer.pair
        name = f"{'WRITE' if transfer.write else 'READ'} {transfer.seq} of {pair.name}"
        stalled = (self.producer_frozen or pair.frozen) and not self.setup.hardware
        if transfer.state == "moving" and not stalled:
            if transfer.moves:
                yield f"{name} moves", lambda: self._move(transfer)
            elif transfer.write or self.producer_alive:
                yield f"{name} lands", lambda: self._land(transfer)
            if faults or not pair.alive or (not transfer.write and not self.producer_alive):
                yield f"{name} breaks", lambda: setattr(transfer, "state", "failed")
        poster_works = self.producer_works if transfer.write else pair.alive and not pair.frozen
        if transfer.state in ("landed", "failed") and poster_works:
            ok = transfer.state == "landed"
            yield f"{name} ends {'well' if ok else 'badly'}", lambda: self._report(transfer, ok=ok)
            if ok and faults:
                yield f"{name} ends well but is taken for failed", lambda: self._report(transfer, ok=False)

    def _move(self, transfer: Transfer) -> None:
        region, index, source, target = transfer.moves.pop()
        pair, content = transfer.pair, self.memory[region, source]
        if transfer.write:
            assert content == self.final(region, index), "S2: a WRITE read what is not the request's final KV"
        assert not (pair.alive and pair.outcome), "S1: bytes landed in a block that had been given back"
        pair.memory[region, target] = content

    def _land(self, transfer: Transfer) -> None:
        transfer.state = "landed"
        if transfer.write:
            transfer.pair.notifications.append((transfer.seq, transfer.total))

    def _report(self, transfer: Transfer, *, ok: bool) -> None:
        transfer.state = "reported"
        if transfer.write:
            self._feed_leg(transfer.pair, events.TransferEnded(transfer.seq, ok))
        else:
            self._feed_consumer(transfer.pair, events.ReadEnded(transfer.seq, ok))

    # --- time and catastrophes ----------------------------------------------------------------------------------------

    def _deadlines(self) -> Iterator[tuple[str, float, Step]]:
        tick = events.DeadlinePassed()
        for pair in self.pairs:
            if (
                pair.works
                and pair.consumer is not None
                and (due := pair.consumer.next_deadline()) is not None
            ):
                yield f"{pair.name}: deadline", due, lambda p=pair: self._feed_consumer(p, tick)
            if self.producer_works and pair.leg is not None and (due := pair.leg.next_deadline()) is not None:
                yield f"leg {pair.name}: deadline", due, lambda p=pair: self._feed_leg(p, tick)
        if self.producer_works and self.lease is not None and (due := self.lease.next_deadline()) is not None:
            yield "lease: deadline", due, lambda: self._feed_lease(tick)

    def _due(self) -> Iterator[tuple[str, Step]]:
        for name, due, step in self._deadlines():
            if due <= self.now:
                yield name, step

    def _catastrophes(self) -> Iterator[tuple[str, Step]]:
        if self.producer_alive:
            yield (
                "producer freezes or thaws",
                lambda: setattr(self, "producer_frozen", not self.producer_frozen),
            )
            yield "producer dies", self._producer_dies
        for pair in self.pairs:
            if pair.alive:
                yield f"{pair.name}: freezes or thaws", lambda p=pair: setattr(p, "frozen", not p.frozen)
                yield f"{pair.name}: dies", lambda p=pair: setattr(p, "alive", False)
            if pair.connections and not pair.connection.broken:
                yield f"{pair.name}: connection is reset", lambda p=pair: self._reset(p.connection)

    def _producer_dies(self) -> None:
        self.producer_alive, self.producer_frozen, self.lease = False, False, None
        for pair in self.pairs:
            pair.leg = None

    def _reset(self, connection: Connection) -> None:
        connection.broken = True
        for queue in (connection.to_producer, connection.to_consumer):
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for pair in self.pairs:
            posted = sum(
                transfer.pair is pair and transfer.write and transfer.state != "reported"
                for transfer in self.transfers
            )
            assert pair.leg is None or pair.leg.num_in_flight == posted
            assert pair.leg is None or pair.leg.state not in producing.TERMINAL
            if pair.consumer is not None:
                assert (pair.consumer.state in consuming.TERMINAL) == (pair.outcome is not None)

    def run_on(self) -> None:
        """Without new faults, until nothing happens any more, however much time passes."""
        for _ in range(3000):
            found = self.operations(faults=False)
            if found:
                self.do(found[self.random.randrange(len(found))])
                continue
            due = min((due for _, due, _ in self._deadlines()), default=None)
            if due is None:
                return
            self.advance(due - self.now)
        raise AssertionError(f"S4: the world does not come to rest: {self.log[-12:]}")

    def settle(self, *, start: bool) -> None:
        """Stop injecting faults and check that everything ends: first as it stands, then with every process running.

        Args:
            start: whether a prefill that has not started will.
        """
        self.may_start = start
        self.run_on()
        for pair in self.pairs:
            if pair.consumer is not None and pair.alive and not pair.frozen and pair.outcome is None:
                assert self.producer_frozen
                assert pair.consumer.state in (ConsumerState.QUARANTINED, ConsumerState.DRAINING)
        self.producer_frozen = False
        for pair in self.pairs:
            pair.frozen = False
        self.run_on()
        for pair in self.pairs:
            assert pair.leg is None, "S4: a leg never closed"
            assert pair.outcome is not None or not pair.alive, "S4: a consumer never heard"
            assert pair.num_closed <= 1
        if self.lease is not None:
            assert self.lease.state is LeaseState.ENDED, "S4: a lease never ended"
            assert len(self.frees) == 1
