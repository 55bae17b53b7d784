"""Producer: races that once went wrong, one test each."""

from kvbaton.base.errors import FailureReason
from kvbaton.kv.layout import Group, GroupKind
from kvbaton.protocol import effects, events
from kvbaton.protocol.effects import Span
from kvbaton.protocol.machine import Effect
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.producer import Producer, ProducerLimits, ProducerState, Wanted

LIMITS = ProducerLimits(park_s=5.0, received_s=5.0, max_in_flight=2)
ENDED = events.Frontier(40, True, (3,), b"", 40)
PART = events.Frontier(17, False, (2,), b"", 40)


def sending(mode: Mode = Mode.PUSH, *, start: int = 0, verify: bool = False) -> Producer:
    wanted = Wanted(mode, (Span(0, start, 3),), 40, b"", verify)
    return Producer(wanted, (Group(GroupKind.ATTENTION, 16),), LIMITS, 0.0)


def feed(machine: Producer, *happened: events.Event) -> list[Effect]:
    emitted: list[Effect] = []
    for event in happened:
        emitted = machine.receive(event, 1.0)
    return emitted


def test_received_after_a_preemption_of_sent_blocks_closes_as_received() -> None:
    machine = sending()
    feed(machine, ENDED, events.Preempted(), events.TransferEnded(0, ok=True))
    machine_early = sending()
    feed(machine_early, ENDED, events.Preempted(), events.ReceivedArrived())

    assert feed(machine, events.ReceivedArrived()) == [effects.LegClosed(None)]
    assert feed(machine_early, events.TransferEnded(0, ok=True)) == [effects.LegClosed(None)]


def test_preempted_after_the_last_write_was_posted_seals_without_a_new_frontier() -> None:
    machine = sending()

    assert feed(machine, ENDED, events.Preempted(), events.TransferEnded(0, ok=True)) == [effects.Seal(1)]
    assert machine.state is ProducerState.SEALED


def test_preempted_with_checksums_to_come_sends_everything_again() -> None:
    machine = sending(verify=True)
    feed(machine, PART, events.TransferEnded(0, ok=True), events.Preempted())

    assert feed(machine, PART) == [effects.PostWrite(1, (Span(0, 0, 1),), None, 0, 1)]
    assert feed(machine, ENDED) == [effects.PostWrite(2, (Span(0, 1, 3),), 3, 0, 1)]


def test_preempted_between_the_last_write_and_its_checksums_fails_once_it_has_ended() -> None:
    machine = sending(verify=True)

    assert feed(machine, ENDED, events.Preempted()) == []
    assert feed(machine, events.TransferEnded(0, ok=True))[-1] == effects.LegClosed(FailureReason.PREEMPTED)


def test_preempted_when_sealed_keeps_a_push_and_revokes_a_pull() -> None:
    push, pull = sending(), sending(Mode.PULL)
    feed(push, ENDED, events.TransferEnded(0, ok=True))
    feed(pull, ENDED)

    assert feed(push, events.Preempted()) == []
    assert feed(pull, events.Preempted()) == [
        effects.SendFailed(FailureReason.PREEMPTED, "the offered blocks were taken back"),
        effects.LegClosed(FailureReason.PREEMPTED),
    ]


def test_peer_ready_while_writes_drain_changes_nothing() -> None:
    machine = sending()
    feed(machine, PART, events.PeerSilent(), events.PeerReady())

    assert machine.state is ProducerState.DRAINING
    assert machine.num_in_flight == 1


def test_received_before_the_total_was_announced_is_refused_once_writes_have_ended() -> None:
    machine = sending()

    assert feed(machine, PART, events.ReceivedArrived()) == []
    assert machine.state is ProducerState.DRAINING
    assert feed(machine, events.TransferEnded(0, ok=True))[-1] == effects.LegClosed(FailureReason.PROTOCOL)


def test_a_frontier_that_shrinks_without_preemption_sends_nothing_twice() -> None:
    machine = sending()
    feed(machine, events.Frontier(32, False, (2,), b"", 40))

    assert feed(machine, PART) == []
    assert feed(machine, ENDED) == [effects.PostWrite(1, (Span(0, 2, 3),), 2, 0, 1)]


def test_a_handoff_of_no_blocks_is_sealed_at_zero_writes() -> None:
    assert feed(sending(start=3), ENDED) == [effects.Seal(0)]


def test_a_span_far_beyond_the_request_is_refused_and_nothing_written() -> None:
    wanted = Wanted(Mode.PUSH, (Span(0, 1 << 61, (1 << 61) + 4),), 40, b"")
    machine = Producer(wanted, (Group(GroupKind.ATTENTION, 16),), LIMITS, 0.0)

    assert feed(machine, PART) == []
    assert feed(machine, ENDED)[-1] == effects.LegClosed(FailureReason.INCOMPATIBLE)


def test_a_tail_waits_until_every_wanted_block_is_named() -> None:
    wanted = Wanted(Mode.PUSH, (Span(0, 0, 3),), 40, b"")
    limits = ProducerLimits(park_s=5.0, received_s=5.0, num_regions=4)
    machine = Producer(wanted, (Group(GroupKind.ATTENTION, 16),), limits, 0.0)

    assert feed(machine, events.Frontier(0, False, (2,), b"", 40, events.Tail(2, 40, True))) == []
    assert feed(machine, events.Frontier(0, False, (3,), b"", 40, events.Tail(3, 40, True))) == [
        effects.PostWrite(0, (Span(0, 0, 3),), None, 0, 3)
    ]
    assert feed(machine, ENDED) == [effects.PostWrite(1, (Span(0, 0, 3),), 2, 3, 4)]
