"""The layer tail: regions of the last blocks leave one by one, and nothing is left out or sent under a wrong name."""

from kvbaton.kv.layout import Group, GroupKind
from kvbaton.protocol import effects, events
from kvbaton.protocol.effects import Span
from kvbaton.protocol.machine import Effect
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.producer import Producer, ProducerLimits, ProducerState, Wanted

NUM_REGIONS = 4
NUM_TOKENS = 40
NUM_BLOCKS = 3


def producer(max_in_flight: int = 100) -> Producer:
    wanted = Wanted(Mode.PUSH, (Span(0, 0, NUM_BLOCKS),), NUM_TOKENS, b"")
    limits = ProducerLimits(60.0, 30.0, max_in_flight=max_in_flight, num_regions=NUM_REGIONS)
    return Producer(wanted, (Group(GroupKind.ATTENTION, 16),), limits, 0.0)


def frontier(
    tokens: int, *, ended: bool = False, tail: int = 0, of: int = NUM_TOKENS, known: int = NUM_BLOCKS
) -> events.Frontier:
    """`tail` regions are through in a step that reaches `of` tokens; 0: no step runs."""
    running = events.Tail(tail, of, of == NUM_TOKENS) if tail else None
    return events.Frontier(tokens, ended, (known,), b"", NUM_TOKENS, running)


def writes(effect_list: list[Effect]) -> list[tuple[tuple[Span, ...], int, int, int | None]]:
    return [
        (e.spans, e.first_region, e.end_region, e.total)
        for e in effect_list
        if isinstance(e, effects.PostWrite)
    ]


TAIL = (Span(0, 1, 3),)


def test_tail_regions_leave_as_they_become_final_and_the_total_follows() -> None:
    machine = producer()

    assert writes(machine.receive(frontier(16), 1)) == [((Span(0, 0, 1),), 0, NUM_REGIONS, None)]
    assert writes(machine.receive(frontier(16, tail=1), 2)) == [(TAIL, 0, 1, None)]
    assert writes(machine.receive(frontier(16, tail=3), 3)) == [(TAIL, 1, 3, None)]
    assert writes(machine.receive(frontier(16, tail=4), 4)) == [(TAIL, 3, 4, None)]
    assert machine.receive(frontier(40, ended=True), 5) == [effects.AnnounceTotal(4)]


def test_tail_missed_by_the_hooks_is_swept_at_the_end() -> None:
    machine = producer()
    machine.receive(frontier(16), 1)
    machine.receive(frontier(16, tail=1), 2)

    assert writes(machine.receive(frontier(40, ended=True), 3)) == [(TAIL, 1, NUM_REGIONS, 3)]


def test_tail_coalesces_while_writes_are_in_flight() -> None:
    machine = producer(max_in_flight=1)
    machine.receive(frontier(0, tail=1), 1)

    assert machine.receive(frontier(0, tail=2), 2) == []
    assert machine.receive(frontier(0, tail=3), 3) == []
    assert writes(machine.receive(events.TransferEnded(0, True), 4)) == [((Span(0, 0, 3),), 1, 3, None)]


def test_tail_after_unsent_whole_blocks_sends_those_first() -> None:
    machine = producer(max_in_flight=1)
    machine.receive(frontier(16), 1)
    machine.receive(frontier(32), 2)

    assert machine.receive(frontier(32, tail=2), 3) == []
    assert writes(machine.receive(events.TransferEnded(0, True), 4)) == [
        ((Span(0, 1, 2),), 0, NUM_REGIONS, None)
    ]
    assert writes(machine.receive(events.TransferEnded(1, True), 5)) == [((Span(0, 2, 3),), 0, 2, None)]


def test_tail_sent_before_preemption_is_sent_again_whole() -> None:
    machine = producer()
    machine.receive(frontier(16, tail=2), 1)
    machine.receive(events.TransferEnded(0, True), 2)
    machine.receive(events.TransferEnded(1, True), 3)
    machine.receive(events.Preempted(), 4)

    assert writes(machine.receive(frontier(40, ended=True), 5)) == [(TAIL, 0, NUM_REGIONS, 3)]


def test_tail_complete_and_landed_seals_at_the_end() -> None:
    machine = producer()
    machine.receive(frontier(0, tail=4), 1)
    machine.receive(events.TransferEnded(0, True), 2)

    assert machine.receive(frontier(40, ended=True), 3) == [effects.Seal(1)]
    assert machine.state is ProducerState.SEALED


def test_every_step_can_go_region_by_region_and_each_ends_before_the_next_begins() -> None:
    machine = producer()
    first, second = (Span(0, 0, 1),), (Span(0, 1, 3),)

    assert writes(machine.receive(frontier(0, tail=2, of=20, known=2), 1)) == [(first, 0, 2, None)]
    assert writes(machine.receive(frontier(20, known=2), 2)) == [(first, 2, NUM_REGIONS, None)]
    assert writes(machine.receive(frontier(20, tail=3), 3)) == [(second, 0, 3, None)]
    assert writes(machine.receive(frontier(40, ended=True), 4)) == [(second, 3, NUM_REGIONS, 4)]


def test_a_slow_link_sends_the_rest_of_an_earlier_tail_then_whole_blocks_then_the_running_tail() -> None:
    machine = producer(max_in_flight=1)
    machine.receive(frontier(0, tail=1, of=16), 1)
    machine.receive(frontier(16), 2)
    machine.receive(frontier(16, tail=2, of=32), 3)
    machine.receive(frontier(32), 4)
    machine.receive(frontier(32, tail=2), 5)

    sent = [writes(machine.receive(events.TransferEnded(seq, True), 6 + seq)) for seq in range(3)]

    assert sent == [
        [((Span(0, 0, 1),), 1, NUM_REGIONS, None)],
        [((Span(0, 1, 2),), 0, NUM_REGIONS, None)],
        [((Span(0, 2, 3),), 0, 2, None)],
    ]


def test_the_total_comes_with_the_last_write_where_a_tail_was_left_open_behind_the_end() -> None:
    machine = producer()
    machine.receive(frontier(0, tail=1, of=16), 1)

    assert writes(machine.receive(frontier(40, ended=True), 2)) == [
        ((Span(0, 0, 1),), 1, NUM_REGIONS, None),
        (TAIL, 0, NUM_REGIONS, 3),
    ]


def test_an_open_tail_keeps_its_blocks_while_the_next_step_is_already_running() -> None:
    machine = producer(max_in_flight=1)
    machine.receive(frontier(0, tail=3, of=16), 1)
    machine.receive(frontier(16, tail=1, of=32), 2)

    assert writes(machine.receive(events.TransferEnded(0, True), 3)) == [((Span(0, 0, 1),), 3, 4, None)]
    assert writes(machine.receive(events.TransferEnded(1, True), 4)) == [((Span(0, 1, 2),), 0, 1, None)]


def test_a_step_preempted_between_two_regions_is_sent_again_whole_in_the_next_one() -> None:
    machine = producer()
    machine.receive(frontier(0, tail=2, of=16), 1)
    machine.receive(events.Preempted(), 2)

    assert writes(machine.receive(frontier(0, tail=1, of=32), 3)) == [((Span(0, 0, 2),), 0, 1, None)]
    assert writes(machine.receive(frontier(32), 4)) == [((Span(0, 0, 2),), 1, NUM_REGIONS, None)]


def test_a_step_that_does_not_reach_an_open_tail_adds_no_regions_to_it() -> None:
    machine = producer()
    machine.receive(frontier(0, tail=1), 1)

    assert machine.receive(frontier(0, tail=3, of=16), 2) == []
