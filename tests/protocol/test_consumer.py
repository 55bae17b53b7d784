"""Consumer: races that once went wrong, and the crossings that are easy to get wrong."""

import pytest

from kvbaton.base.errors import FailureReason
from kvbaton.kv.blocks import group_blocks
from kvbaton.protocol import effects, events
from kvbaton.protocol.consumer import Consumer, ConsumerState
from kvbaton.protocol.machine import Effect, Event, Unexpected
from kvbaton.protocol.mode import Mode

OFFER = events.OfferArrived(0, (group_blocks(0, [8, 9]),), True, b"crc")


def receiving(mode: Mode, *, verify: bool = False) -> Consumer:
    machine = Consumer(mode, (group_blocks(0, [1, 2]),), verify=verify, ttl_s=9.0, now=0.0)
    machine.receive(events.PeerReady(), 0.0)
    return machine


def feed(machine: Consumer, *happened: Event) -> list[Effect]:
    emitted: list[Effect] = []
    for event in happened:
        emitted = machine.receive(event, 1.0)
    return emitted


@pytest.mark.parametrize(
    "event",
    [
        events.FailedArrived(FailureReason.LEASE_EXPIRED, "revoked"),
        events.CancelledArrived(),
        events.PeerSilent(),
        events.PeerDead(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_pull_that_is_revoked_while_checking_fails_at_once(event: Event) -> None:
    machine = receiving(Mode.PULL, verify=True)
    feed(machine, OFFER, events.ReadEnded(0, ok=True))

    assert machine.state is ConsumerState.CHECKING
    assert [type(effect) for effect in feed(machine, event)] == [effects.Fail]


@pytest.mark.parametrize(
    "event", [events.FailedArrived(FailureReason.LEASE_EXPIRED, ""), events.PeerSilent(), events.PeerDead()]
)
def test_a_push_that_has_everything_commits_whatever_becomes_of_the_peer(event: Event) -> None:
    machine = receiving(Mode.PUSH, verify=True)
    feed(machine, events.WriteArrived(0, 1), events.SealedArrived(1, b"crc"), event)

    assert feed(machine, events.Checked(ok=True)) == [effects.SendReceived(), effects.Commit()]


def test_sealed_before_the_last_notification_waits_for_it() -> None:
    machine = receiving(Mode.PUSH)
    feed(machine, events.WriteArrived(1, None), events.SealedArrived(2, b""))

    assert machine.state is ConsumerState.RECEIVING
    assert feed(machine, events.WriteArrived(0, None))[-1] == effects.Commit()


def test_total_known_early_still_waits_for_earlier_writes() -> None:
    machine = receiving(Mode.PUSH)

    assert feed(machine, events.WriteArrived(2, 3), events.WriteArrived(0, None)) == []
    assert feed(machine, events.WriteArrived(1, None))[-1] == effects.Commit()


def test_a_handoff_of_no_blocks_commits_on_sealed_alone() -> None:
    machine = Consumer(Mode.PUSH, (group_blocks(0, []),), verify=False, ttl_s=9.0, now=0.0)

    assert feed(machine, events.PeerReady(), events.SealedArrived(0, b""))[-1] == effects.Commit()


def test_a_pull_of_no_blocks_asks_for_confirmation_without_reading() -> None:
    machine = Consumer(Mode.PULL, (group_blocks(5, []),), verify=False, ttl_s=9.0, now=0.0)
    emitted = feed(machine, events.PeerReady(), events.OfferArrived(0, (group_blocks(5, []),), True, b""))

    assert emitted == [effects.SendReceived()]
    assert feed(machine, events.ConfirmedArrived()) == [effects.Commit()]


def test_failed_while_a_read_runs_ends_only_when_the_read_has() -> None:
    machine = receiving(Mode.PULL)

    assert feed(machine, OFFER, events.FailedArrived(FailureReason.PREEMPTED, "")) == [
        effects.Quarantined(FailureReason.PREEMPTED)
    ]
    assert machine.state is ConsumerState.DRAINING
    assert feed(machine, events.ReadEnded(0, ok=True)) == [effects.Fail(FailureReason.PREEMPTED, "")]


def test_an_aborted_push_keeps_its_blocks_until_the_producer_answers() -> None:
    machine = receiving(Mode.PUSH)

    assert feed(machine, events.WriteArrived(0, 2), events.Abort()) == [
        effects.SendCancel(FailureReason.ABORTED)
    ]
    assert feed(machine, events.WriteArrived(1, None)) == []
    assert feed(machine, events.CancelledArrived()) == [effects.Fail(FailureReason.ABORTED, "")]


def test_a_repeated_notification_is_counted_not_believed() -> None:
    machine = receiving(Mode.PUSH)

    emitted = feed(machine, events.WriteArrived(0, None), events.WriteArrived(0, None))

    assert [type(effect) for effect in emitted] == [Unexpected]
    assert machine.state is ConsumerState.RECEIVING
