"""Lease: who may hold a prefill's blocks, and for how long."""

from kvbaton.base.errors import FailureReason
from kvbaton.protocol import effects, events
from kvbaton.protocol.lease import Lease, LeaseState
from kvbaton.protocol.machine import Effect, Event


def feed(machine: Lease, *happened: Event, now: float = 1.0) -> list[Effect]:
    emitted: list[Effect] = []
    for event in happened:
        emitted = machine.receive(event, now)
    return emitted


def test_release_asked_while_ending_closes_the_legs_that_still_send() -> None:
    lease = Lease(ttl_s=5.0)
    feed(lease, events.LegOpened(2), events.LegOpened(2), events.Finished(), events.LegDeclined())

    assert lease.state is LeaseState.ENDING
    assert feed(lease, events.ReleaseAsked()) == [effects.CloseLegs(FailureReason.RELEASED)]
    assert [type(effect) for effect in feed(lease, events.LegLost())] == [effects.Free]


def test_fan_out_of_two_frees_after_the_second_consumer_rank_only() -> None:
    lease = Lease(ttl_s=5.0)

    assert feed(lease, events.LegOpened(2), events.Finished(), events.LegReceived()) == []
    assert lease.accepts_legs
    assert feed(lease, events.LegOpened(2), events.LegReceived()) == [effects.Free(report=True, reason=None)]


def test_received_before_finished_frees_on_finished() -> None:
    lease = Lease(ttl_s=5.0)

    assert feed(lease, events.LegOpened(1), events.LegReceived()) == []
    assert not lease.accepts_legs
    assert feed(lease, events.Finished()) == [effects.Free(report=True, reason=None)]


def test_aborted_waits_for_open_legs_before_it_frees() -> None:
    lease = Lease(ttl_s=5.0)

    assert feed(lease, events.LegOpened(1), events.Aborted(held=True)) == [
        effects.CloseLegs(FailureReason.PREFILL_ABORTED)
    ]
    assert feed(lease, events.LegLost()) == [effects.Free(report=True, reason=FailureReason.PREFILL_ABORTED)]


def test_a_lost_leg_leaves_the_blocks_for_the_next_consumer_until_the_lease_expires() -> None:
    lease = Lease(ttl_s=5.0)
    feed(lease, events.LegOpened(1), events.Finished())

    assert lease.next_deadline() is None
    assert feed(lease, events.LegLost(), now=2.0) == []
    assert lease.next_deadline() == 7.0
    assert feed(lease, events.DeadlinePassed(), now=7.0) == [
        effects.Free(report=True, reason=FailureReason.LEASE_EXPIRED)
    ]


def test_a_release_before_the_prefill_ended_frees_when_it_ends_unless_someone_came() -> None:
    unwanted, wanted = Lease(ttl_s=5.0), Lease(ttl_s=5.0)
    feed(unwanted, events.ReleaseAsked())
    feed(wanted, events.ReleaseAsked(), events.LegOpened(1))

    assert feed(unwanted, events.Finished()) == [effects.Free(report=True, reason=FailureReason.RELEASED)]
    assert feed(wanted, events.Finished()) == []
    assert wanted.accepts_legs
