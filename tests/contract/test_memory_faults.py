"""Each fault of the memory network does what it says: with the knob one thing happens, without it another."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvbaton.base.errors import PeerUnreachable, TransferFailed, TransportError
from kvbaton.base.ids import AgentName
from kvbaton.testing.transport_pair import Pair, Peer
from kvbaton.transport.base import TransferState
from kvbaton.transport.faults import (
    Corrupt,
    Delay,
    DropNotification,
    Fail,
    Hold,
    LateNotification,
    Refuse,
    RepeatNotification,
)
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport

A, B = AgentName("a"), AgentName("b")
ROWS = [(0, 0, 100), (200, 200, 100)]


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def pair(network: MemoryNetwork) -> Iterator[Pair]:
    pair = Pair(Peer.start(MemoryTransport(network, A), 4096), Peer.start(MemoryTransport(network, B), 4096))
    pair.connect()
    pair.ours.fill(1)
    yield pair
    pair.close()


def payloads(pair: Pair) -> list[bytes]:
    return [each.payload for each in pair.theirs.transport.notifications()]


def send(pair: Pair, payload: bytes) -> TransferState:
    return pair.ours.transport.poll(pair.post(pair.plan(*ROWS), payload))


def moved(pair: Pair) -> int:
    return int(np.count_nonzero(pair.theirs.memory))


def test_bytes_move_in_poll_not_in_post(pair: Pair) -> None:
    handle = pair.post(pair.plan(*ROWS), b"n")

    assert moved(pair) == 0
    assert pair.ours.transport.poll(handle) is TransferState.DONE
    assert moved(pair) == 200


def test_drop_loses_the_notification_but_not_the_data(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(DropNotification())
    first, second = send(pair, b"lost"), send(pair, b"kept")

    assert (first, second) == (TransferState.DONE, TransferState.DONE)
    assert payloads(pair) == [b"kept"]
    assert moved(pair) == 200


def test_repeat_delivers_copies(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(RepeatNotification(copies=3))
    send(pair, b"again")
    send(pair, b"once")

    assert payloads(pair) == [b"again"] * 3 + [b"once"]


def test_late_notification_comes_after_the_next_one(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(LateNotification())
    send(pair, b"first")
    before = payloads(pair)
    send(pair, b"second")

    assert before == []
    assert payloads(pair) == [b"second", b"first"]


def test_late_notification_without_a_next_one_waits_for_release_held(
    network: MemoryNetwork, pair: Pair
) -> None:
    network.inject(LateNotification())
    send(pair, b"only")
    network.release_held()

    assert payloads(pair) == [b"only"]


def test_delay_keeps_a_transfer_pending_for_that_many_polls(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(Delay(polls=2))
    handle = pair.post(pair.plan(*ROWS), b"n")
    states = [pair.ours.transport.poll(handle) for _ in range(3)]

    assert states == [TransferState.PENDING, TransferState.PENDING, TransferState.DONE]


def test_hold_keeps_a_transfer_pending_until_released(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(Hold())
    handle = pair.post(pair.plan(*ROWS), b"n")
    held = {pair.ours.transport.poll(handle) for _ in range(50)}
    with pytest.raises(TransportError):
        pair.ours.transport.release(handle)
    seen_early = (moved(pair), payloads(pair))
    network.release_held()

    assert held == {TransferState.PENDING}
    assert seen_early == (0, [])
    assert pair.ours.transport.poll(handle) is TransferState.DONE
    pair.ours.transport.release(handle)


@pytest.mark.parametrize("after_bytes", [0, 1, 150, 200])
def test_fail_moves_so_many_bytes_and_notifies_nobody(
    network: MemoryNetwork, pair: Pair, after_bytes: int
) -> None:
    network.inject(Fail(after_bytes))
    state = send(pair, b"n")

    assert state is TransferState.FAILED
    assert moved(pair) == after_bytes
    assert payloads(pair) == []


def test_refuse_raises_and_moves_nothing(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(Refuse())
    with pytest.raises(TransferFailed):
        send(pair, b"n")

    assert moved(pair) == 0
    assert send(pair, b"n") is TransferState.DONE


@pytest.mark.parametrize("offset", [0, 99, 100, 199])
def test_corrupt_changes_exactly_one_byte(network: MemoryNetwork, pair: Pair, offset: int) -> None:
    network.inject(Corrupt(offset))
    send(pair, b"n")
    got = np.concatenate([pair.theirs.memory[:100], pair.theirs.memory[200:300]])
    sent = np.concatenate([pair.ours.memory[:100], pair.ours.memory[200:300]])

    assert np.flatnonzero(got != sent).tolist() == [offset]


def test_injection_hits_only_the_named_direction_and_only_so_often(
    network: MemoryNetwork, pair: Pair
) -> None:
    network.inject(Refuse(), initiator=B, target=A, times=2)
    other = pair.swapped()
    ours = send(pair, b"n")
    refused = 0
    for _ in range(3):
        try:
            send(other, b"n")
        except TransferFailed:
            refused += 1

    assert ours is TransferState.DONE
    assert refused == 2


def test_several_faults_hit_one_transfer_together(network: MemoryNetwork, pair: Pair) -> None:
    network.inject(Delay(1))
    network.inject(Corrupt(5))
    network.inject(RepeatNotification(2))
    handle = pair.post(pair.plan(*ROWS), b"n")
    states = [pair.ours.transport.poll(handle) for _ in range(2)]

    assert states == [TransferState.PENDING, TransferState.DONE]
    assert payloads(pair) == [b"n", b"n"]
    assert pair.theirs.memory[5] == pair.ours.memory[5] ^ 0xFF


def test_killed_target_fails_pending_transfers_and_refuses_new_ones(
    network: MemoryNetwork, pair: Pair
) -> None:
    network.inject(Hold())
    handle = pair.post(pair.plan(*ROWS), b"n")
    network.kill(B)

    assert pair.ours.transport.poll(handle) is TransferState.FAILED
    assert moved(pair) == 0
    with pytest.raises(PeerUnreachable):
        send(pair, b"n")
    with pytest.raises(TransportError):
        pair.theirs.transport.notifications()


def test_silently_killed_target_keeps_transfers_pending_for_ever(network: MemoryNetwork, pair: Pair) -> None:
    network.kill(B, silently=True)
    handle = pair.post(pair.plan(*ROWS), b"n")

    assert {pair.ours.transport.poll(handle) for _ in range(50)} == {TransferState.PENDING}
    assert moved(pair) == 0


def test_agent_restarted_under_its_name_needs_a_new_connection(network: MemoryNetwork, pair: Pair) -> None:
    old = pair.theirs.transport.metadata()
    network.kill(B)
    again = Peer.start(MemoryTransport(network, B), 4096)
    with pytest.raises(PeerUnreachable):
        send(pair, b"n")
    with pytest.raises(PeerUnreachable):
        pair.ours.transport.connect(old)
    successor = Pair(pair.ours, again)
    successor.connect()

    assert send(successor, b"n") is TransferState.DONE
    assert moved(successor) == 200


def test_name_of_a_living_agent_cannot_be_taken(network: MemoryNetwork, pair: Pair) -> None:
    with pytest.raises(TransportError):
        MemoryTransport(network, pair.ours.transport.name)


@pytest.mark.parametrize("frozen", [A, B])
def test_frozen_agent_stalls_transfers_until_thawed(
    network: MemoryNetwork, pair: Pair, frozen: AgentName
) -> None:
    network.freeze(frozen)
    handle = pair.post(pair.plan(*ROWS), b"n")
    stalled = {pair.ours.transport.poll(handle) for _ in range(50)}
    network.thaw(frozen)

    assert stalled == {TransferState.PENDING}
    assert pair.ours.transport.poll(handle) is TransferState.DONE
    assert payloads(pair) == [b"n"]


def test_frozen_target_sees_no_notification_until_thawed(network: MemoryNetwork, pair: Pair) -> None:
    send(pair, b"n")
    network.freeze(B)
    frozen = payloads(pair)
    network.thaw(B)

    assert frozen == []
    assert payloads(pair) == [b"n"]


def test_closed_target_fails_a_pending_transfer_without_touching_its_memory(
    network: MemoryNetwork, pair: Pair
) -> None:
    handle = pair.post(pair.plan(*ROWS), b"n")
    pair.theirs.transport.close()

    assert pair.ours.transport.poll(handle) is TransferState.FAILED
    assert moved(pair) == 0


def test_network_used_from_two_threads_loses_nothing(network: MemoryNetwork, pair: Pair) -> None:
    def drive(side: Pair) -> list[bytes]:
        got: list[bytes] = []
        for index in range(300):
            side.ours.transport.poll(side.post(side.plan((index, 2000 + index, 1)), b"%d" % index))
            got += [each.payload for each in side.ours.transport.notifications()]
        return got

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(drive, (pair, pair.swapped()))
    rest_first = [each.payload for each in pair.ours.transport.notifications()]
    rest_second = [each.payload for each in pair.theirs.transport.notifications()]

    expected = [b"%d" % index for index in range(300)]
    assert first + rest_first == expected
    assert second + rest_second == expected
