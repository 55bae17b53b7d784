"""Every configuration a machine can reach, met by every event: listed pairs work, the others change nothing.

Machines are explored breadth-first. An event is *possible* in a configuration when the shell could really produce it there;
every possible event of ours has to be handled, so a gap in a table shows up as a LocalProtocolError here and not in a courier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import pytest

from kvbaton.base.errors import FailureReason, LocalProtocolError
from kvbaton.kv.blocks import group_blocks
from kvbaton.kv.layout import Group, GroupKind
from kvbaton.protocol import consumer, effects, events, lease, peer, producer
from kvbaton.protocol.consumer import Consumer, ConsumerState
from kvbaton.protocol.effects import Span
from kvbaton.protocol.lease import Lease, LeaseState
from kvbaton.protocol.machine import Event, Machine, Unexpected
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.peer import Heartbeat, Peer, PeerState
from kvbaton.protocol.producer import Producer, ProducerLimits, ProducerState, Wanted

AnyMachine = Machine[Any]


@dataclass(frozen=True, eq=False)
class Subject:
    """One way to set a machine up, and what its world can do to it.

    Attributes:
        make: a fresh machine.
        events: the alphabet; every event class appears, some with several payloads.
        possible: whether the shell could produce this event of ours now.
        successors: by state, the states that may follow.
        terminal: where it ends.
        last: effect classes of which exactly one is emitted in a life, with the step into a terminal state.
        ending: events that lead to a terminal state from anywhere; impossible ones are skipped.
    """

    name: str
    make: Callable[[], AnyMachine]
    events: list[Event]
    possible: Callable[[Any, Event], bool]
    successors: dict[Enum, set[Enum]]
    terminal: frozenset[Enum]
    last: tuple[type, ...]
    ending: list[Event]
    depth: int = 7
    limit: int = 500

    def __str__(self) -> str:
        return self.name


def snapshot(machine: AnyMachine) -> str:
    return repr([(name, value) for name, value in sorted(vars(machine).items()) if name != "_effects"])


def clone(machine: AnyMachine) -> AnyMachine:
    twin = object.__new__(type(machine))
    for name, value in vars(machine).items():
        setattr(twin, name, value.copy() if isinstance(value, list | set | dict) else value)
    return twin


NOW = 10.0


@cache
def explore(subject: Subject) -> list[AnyMachine]:
    """Every configuration up to a depth, each once; the caller clones what it feeds."""
    found: list[AnyMachine] = []
    seen: set[str] = set()
    layer = [subject.make()]
    for _ in range(subject.depth):
        following: list[AnyMachine] = []
        for machine in layer:
            mark = snapshot(machine)
            if mark in seen or len(seen) >= subject.limit:
                continue
            seen.add(mark)
            found.append(machine)
            for event in subject.events:
                if event.remote or subject.possible(machine, event):
                    twin = clone(machine)
                    twin.receive(event, NOW)
                    following.append(twin)
        layer = following
    return found


# --- consumer ---------------------------------------------------------------------------------------------------------

OURS = (group_blocks(0, [4, 5, 6]), group_blocks(1, [7]))


def offer(seq: int, *, last: bool, first: int = 0, ids: tuple[int, ...] = (1, 2, 3)) -> events.OfferArrived:
    return events.OfferArrived(seq, (group_blocks(first, ids), group_blocks(1, [9])), last, b"")


PEER_EVENTS: list[Event] = [
    events.PeerReady(),
    events.PeerUnreachable(FailureReason.PEER_UNREACHABLE, "no route"),
    events.PeerSilent(),
    events.PeerDead(),
    events.DeadlinePassed(),
]
CONSUMER_EVENTS: list[Event] = [
    *PEER_EVENTS,
    events.WriteArrived(0, None),
    events.WriteArrived(1, 2),
    events.WriteArrived(0, 1),
    events.WriteArrived(7, 2),
    events.WriteArrived(consumer.MAX_TRANSFERS, None),
    events.TotalArrived(1),
    events.TotalArrived(2),
    events.SealedArrived(0, b""),
    events.SealedArrived(2, b"crc"),
    offer(0, last=True),
    offer(0, last=False, ids=(1,)),
    offer(1, last=True, first=1, ids=(2, 3)),
    offer(0, last=True, ids=(1, 2)),
    offer(0, last=True, ids=(1, 2, 3, 4)),
    events.OfferArrived(0, (group_blocks(0, []), group_blocks(1, [])), False, b""),
    events.OfferArrived(0, (), True, b""),
    events.ConfirmedArrived(),
    events.FailedArrived(FailureReason.PREEMPTED, "taken"),
    events.CancelledArrived(),
    events.ReadEnded(0, ok=True),
    events.ReadEnded(0, ok=False, detail="lost"),
    events.Checked(ok=True),
    events.Checked(ok=False, detail="block 3"),
    events.Abort(),
]
C = ConsumerState
DOUBT = {C.CANCELLING, C.QUARANTINED, C.DRAINING, C.FAILED}
CONSUMER_SUCCESSORS: dict[Enum, set[Enum]] = {
    C.CONNECTING: {C.CONNECTING, C.REGISTERED, C.FAILED},
    C.REGISTERED: {C.REGISTERED, C.RECEIVING, C.CHECKING, C.CONFIRMING, C.COMMITTED, *DOUBT},
    C.RECEIVING: {C.RECEIVING, C.CHECKING, C.CONFIRMING, C.COMMITTED, *DOUBT},
    C.CHECKING: {C.CHECKING, C.CONFIRMING, C.COMMITTED, C.FAILED},
    C.CONFIRMING: {C.CONFIRMING, C.COMMITTED, C.FAILED},
    C.CANCELLING: {C.CANCELLING, C.QUARANTINED, C.FAILED},
    C.QUARANTINED: {C.QUARANTINED, C.CANCELLING, C.FAILED},
    C.DRAINING: {C.DRAINING, C.FAILED},
    C.COMMITTED: {C.COMMITTED},
    C.FAILED: {C.FAILED},
}


def consumer_possible(machine: Consumer, event: Event) -> bool:
    if machine.state in consumer.TERMINAL:
        return False  # the shell forgets a machine that has ended
    match event:
        case events.PeerUnreachable():
            return machine.state is C.CONNECTING
        case events.DeadlinePassed():
            return machine.next_deadline() is not None
        case events.ReadEnded():
            return machine._num_reading > 0
        case events.Checked():
            return machine.state is C.CHECKING
        case events.PeerReady() | events.PeerSilent() | events.PeerDead() | events.Abort():
            return True
    return False


def consumer_subject(mode: Mode, *, verify: bool) -> Subject:
    return Subject(
        name=f"consumer-{mode}{'-verify' if verify else ''}",
        make=lambda: Consumer(mode, OURS, verify=verify, ttl_s=5.0, now=0.0),
        events=CONSUMER_EVENTS,
        possible=consumer_possible,
        successors=CONSUMER_SUCCESSORS,
        terminal=consumer.TERMINAL,
        last=(effects.Commit, effects.Fail),
        ending=[events.Abort(), events.PeerDead(), *[events.ReadEnded(0, ok=False)] * 9],
    )


# --- producer ---------------------------------------------------------------------------------------------------------

GROUPS = (Group(GroupKind.ATTENTION, 16), Group(GroupKind.STATE, 1024))


def frontier(tokens: int, *, ended: bool = False, digest: bytes = b"d", tail: int = 0) -> events.Frontier:
    running = events.Tail(tail, 40, True) if tail else None
    return events.Frontier(tokens, ended, (3 if tail else -(-tokens // 16), 1), digest, 40, running)


PRODUCER_EVENTS: list[Event] = [
    *PEER_EVENTS,
    frontier(16),
    frontier(32),
    frontier(32, tail=1),
    frontier(32, tail=2),
    events.Frontier(0, False, (2, 1), b"d", 40, events.Tail(1, 32, False)),
    frontier(40, ended=True),
    frontier(40, ended=True, digest=b"other"),
    events.Frontier(40, True, (2, 1), b"d", 40),
    events.Frontier(0, False, (0, 0, 0), b"d", 40),
    events.Frontier(0, False, (0, 0), b"d", 41),
    events.TransferEnded(0, ok=True),
    events.TransferEnded(0, ok=False, detail="lost"),
    events.PrefillLost(FailureReason.PREFILL_ABORTED),
    events.Preempted(),
    events.ReceivedArrived(),
    events.CancelArrived(FailureReason.ABORTED),
]
P = ProducerState
PRODUCER_SUCCESSORS: dict[Enum, set[Enum]] = {
    P.PARKED: {P.PARKED, P.SENDING, P.SEALED, P.CLOSED},
    P.SENDING: {P.SENDING, P.SEALED, P.DRAINING, P.RECEIVED, P.CLOSED},
    P.SEALED: {P.SEALED, P.RECEIVED, P.CLOSED},
    P.DRAINING: {P.DRAINING, P.CLOSED},
    P.RECEIVED: {P.RECEIVED},
    P.CLOSED: {P.CLOSED},
}


def producer_possible(machine: Producer, event: Event) -> bool:
    if machine.state in producer.TERMINAL:
        return False
    match event:
        case events.PeerUnreachable():
            return False  # it reached us
        case events.DeadlinePassed():
            return machine.next_deadline() is not None
        case events.TransferEnded():
            return machine.num_in_flight > 0
    return True


def producer_subject(mode: Mode, *, stream: bool, empty: bool = False) -> Subject:
    spans = (Span(0, 3, 3), Span(1, 1, 1)) if empty else (Span(0, 0, 3), Span(1, 0, 1))
    limits = ProducerLimits(park_s=5.0, received_s=5.0, max_in_flight=2, stream=stream, num_regions=2)
    return Subject(
        name=f"producer-{mode}{'-stream' if stream else ''}{'-empty' if empty else ''}",
        make=lambda: Producer(Wanted(mode, spans, 40, b"d"), GROUPS, limits, 0.0),
        events=PRODUCER_EVENTS,
        possible=producer_possible,
        successors=PRODUCER_SUCCESSORS,
        terminal=producer.TERMINAL,
        last=(effects.LegClosed,),
        ending=[events.PeerDead(), *[events.TransferEnded(0, ok=True)] * 9],
    )


# --- lease ------------------------------------------------------------------------------------------------------------

LEASE_EVENTS: list[Event] = [
    events.LegOpened(1),
    events.LegOpened(2),
    events.LegReceived(),
    events.LegDeclined(),
    events.LegLost(),
    events.Finished(),
    events.Aborted(held=True),
    events.Aborted(held=False),
    events.ReleaseAsked(),
    events.DeadlinePassed(),
]
L = LeaseState
LEASE_SUCCESSORS: dict[Enum, set[Enum]] = {
    L.COMPUTING: set(L),
    L.HELD: {L.HELD, L.ENDING, L.ENDED},
    L.ENDING: {L.ENDING, L.ENDED},
    L.ENDED: {L.ENDED},
}


def lease_possible(machine: Lease, event: Event) -> bool:
    if machine.state in lease.TERMINAL:
        return False
    match event:
        case events.LegOpened():
            return machine.accepts_legs and machine.num_legs < 4
        case events.LegOutcome():
            return machine.num_legs > 0
        case events.Finished() | events.Aborted():
            return machine.state is L.COMPUTING  # the scheduler ends a request once
        case events.DeadlinePassed():
            return machine.next_deadline() is not None
    return True


LEASE = Subject(
    name="lease",
    make=lambda: Lease(ttl_s=5.0),
    events=LEASE_EVENTS,
    possible=lease_possible,
    successors=LEASE_SUCCESSORS,
    terminal=lease.TERMINAL,
    last=(effects.Free,),
    ending=[events.Aborted(held=True), *[events.LegLost()] * 9, events.DeadlinePassed()],
)

# --- peer -------------------------------------------------------------------------------------------------------------

PEER_ALPHABET: list[Event] = [
    peer.Welcomed(),
    peer.DialFailed(True, FailureReason.PEER_UNREACHABLE, "refused"),
    peer.DialFailed(False, FailureReason.PEER_UNREACHABLE, "timed out"),
    peer.Heard(),
    peer.ConnectionEnded(orderly=True),
    peer.ConnectionEnded(orderly=False),
    peer.Tick(),
]
S = PeerState
PEER_SUCCESSORS: dict[Enum, set[Enum]] = {
    S.WAITING: {S.DIALLING},
    S.DIALLING: {S.READY, S.WAITING},
    S.READY: {S.READY, S.SILENT, S.PROBING, S.DEAD},
    S.SILENT: {S.READY, S.SILENT, S.PROBING, S.DEAD},
    S.PROBING: {S.READY, S.PAUSING, S.DEAD},
    S.PAUSING: {S.PROBING},
    S.DEAD: {S.DEAD},
}
CONNECTED = {S.READY, S.SILENT}


def peer_possible(machine: Peer, event: Event) -> bool:
    match event:
        case peer.Welcomed() | peer.DialFailed():
            return machine.state in {S.DIALLING, S.PROBING}
        case peer.Heard() | peer.ConnectionEnded():
            return machine.state in CONNECTED | {S.DEAD}  # what was read before the end may be told after it
        case _:
            return machine.next_deadline() is not None


def peer_subject(*, accepted: bool) -> Subject:
    return Subject(
        name=f"peer-{'accepted' if accepted else 'dialled'}",
        make=lambda: Peer(Heartbeat(), 0.0, accepted=accepted),
        events=PEER_ALPHABET,
        possible=peer_possible,
        successors=PEER_SUCCESSORS,
        terminal=peer.TERMINAL,
        last=(peer.AnnounceDead,),
        ending=[
            peer.Welcomed(),
            peer.Tick(),
            peer.Welcomed(),
            peer.ConnectionEnded(orderly=False),
            peer.DialFailed(True, FailureReason.PEER_LOST, "refused"),
        ],
    )


CONSUMERS = [consumer_subject(mode, verify=verify) for mode in Mode for verify in (False, True)]
PRODUCERS = [
    *[producer_subject(mode, stream=stream) for mode in Mode for stream in (False, True)],
    producer_subject(Mode.PUSH, stream=True, empty=True),
]
PEERS = [peer_subject(accepted=accepted) for accepted in (False, True)]
SUBJECTS = [*CONSUMERS, *PRODUCERS, LEASE, *PEERS]


def handled_or_refused(subject: Subject, machine: AnyMachine, event: Event) -> None:
    """One cell of the table, with everything that must hold of it."""
    before = snapshot(machine)
    state = machine.state
    listed = (state, type(event)) in machine.transitions
    if not listed and not event.remote:
        with pytest.raises(LocalProtocolError) as caught:
            machine.receive(event, NOW)

        assert state.name in str(caught.value)
        assert snapshot(machine) == before
        assert not subject.possible(machine, event), f"{event} really happens in {machine.state}"
        return
    if not (event.remote or subject.possible(machine, event)):
        return  # a misuse that the table cannot tell from a use
    emitted = machine.receive(event, NOW)
    if not listed:
        assert [type(effect) for effect in emitted] == [Unexpected]
        assert snapshot(machine) == before
        return
    ended = [effect for effect in emitted if isinstance(effect, subject.last)]

    assert machine.state in subject.successors[state]
    assert len(ended) == (machine.state in subject.terminal and state not in subject.terminal)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_every_configuration_handles_what_can_happen_and_refuses_the_rest_unchanged(subject: Subject) -> None:
    for machine in explore(subject):
        for event in subject.events:
            handled_or_refused(subject, clone(machine), event)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_every_configuration_can_end(subject: Subject) -> None:
    for machine in explore(subject):
        twin = clone(machine)
        for event in subject.ending:
            if twin.state not in subject.terminal and subject.possible(twin, event):
                twin.receive(event, NOW)

        assert twin.state in subject.terminal, f"stuck: {snapshot(machine)}"


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_deadline_that_was_handled_is_not_due_again(subject: Subject) -> None:
    tick: Event = peer.Tick() if subject in PEERS else events.DeadlinePassed()
    for machine in explore(subject):
        due = machine.next_deadline()
        if due is None:
            continue
        twin = clone(machine)
        now = max(due, NOW)
        twin.receive(tick, now)

        following = twin.next_deadline()
        assert following is None or following > now, f"busy loop: {snapshot(machine)}"


@pytest.mark.parametrize(
    ("subjects", "states"),
    [(CONSUMERS, ConsumerState), (PRODUCERS, ProducerState), ([LEASE], LeaseState), (PEERS, PeerState)],
    ids=["consumer", "producer", "lease", "peer"],
)
def test_the_exploration_reaches_every_state(subjects: list[Subject], states: type[Enum]) -> None:
    reached = {machine.state for subject in subjects for machine in explore(subject)}

    assert reached == set(states)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_terminal_states_lead_nowhere(subject: Subject) -> None:
    for state in subject.terminal:
        assert subject.successors[state] == {state}
