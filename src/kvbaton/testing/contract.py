"""TransportContract: what every Transport must do, as one pytest class that each implementation subclasses."""

import uuid
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from kvbaton.base.errors import PeerUnreachable, TransportError, UnknownHandle, UnregisteredRange
from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.layout import Region
from kvbaton.testing.transport_pair import BIG_BYTES, BUFFER_BYTES, Pair, Peer, wait_until
from kvbaton.transport.base import Notification, Operation, TransferState, Transport


class TransportContract:
    """Subclass as `class Test...` and override `make_transport`."""

    big_bytes: ClassVar[int] = BIG_BYTES

    def make_transport(self, name: AgentName) -> Transport:
        """A new agent that can reach all others made here during this test."""
        raise NotImplementedError

    def _peer(self, num_bytes: int = BUFFER_BYTES) -> Peer:
        return Peer.start(self.make_transport(AgentName(f"agent-{uuid.uuid4()}")), num_bytes)

    @pytest.fixture
    def strangers(self) -> Iterator[Pair]:
        """Two agents that were not connected."""
        pair = Pair(self._peer(), self._peer())
        yield pair
        pair.close()

    @pytest.fixture
    def pair(self, strangers: Pair) -> Pair:
        """Two agents connected both ways."""
        strangers.connect()
        return strangers

    # -- moving bytes -------------------------------------------------------------------------------------------------

    def test_write_moves_exactly_the_planned_bytes(self, pair: Pair) -> None:
        pair.ours.fill(1)
        handle = pair.post(pair.plan((0, 4096, 1000)), b"written")
        arrived = pair.finish(handle)

        assert pair.ours.transport.poll(handle) is TransferState.DONE
        assert arrived == [Notification(pair.ours.transport.name, b"written")]
        np.testing.assert_array_equal(pair.theirs.memory[4096:5096], pair.ours.memory[:1000])
        assert not pair.theirs.memory[:4096].any()
        assert not pair.theirs.memory[5096:].any()

    def test_read_moves_exactly_the_planned_bytes(self, pair: Pair) -> None:
        pair.theirs.fill(2)
        handle = pair.post(pair.plan((512, 0, 777)), b"read", Operation.READ)
        arrived = pair.finish(handle)

        assert arrived == [Notification(pair.ours.transport.name, b"read")]
        np.testing.assert_array_equal(pair.ours.memory[512:1289], pair.theirs.memory[:777])
        assert not pair.ours.memory[1289:].any()

    @pytest.mark.parametrize("operation", Operation)
    def test_many_scattered_ranges_all_land(self, pair: Pair, operation: Operation) -> None:
        pair.ours.fill(3)
        pair.theirs.fill(4)
        order = np.random.default_rng(5).permutation(2048)
        rows = [(index * 512, int(slot) * 512, 512) for index, slot in enumerate(order)]
        ours, theirs = pair.ours.memory.copy(), pair.theirs.memory.copy()
        pair.finish(pair.post(pair.plan(*rows), b"n", operation))

        if operation is Operation.WRITE:
            theirs.reshape(2048, 512)[order] = ours.reshape(2048, 512)
        else:
            ours.reshape(2048, 512)[:] = theirs.reshape(2048, 512)[order]
        np.testing.assert_array_equal(pair.ours.memory, ours)
        np.testing.assert_array_equal(pair.theirs.memory, theirs)

    def test_ranges_of_different_lengths_all_land(self, pair: Pair) -> None:
        pair.ours.fill(6)
        rows = [(0, 100, 1), (10, 300, 7), (8192, 65536, 131072), (4000, 1000, 4096)]
        pair.finish(pair.post(pair.plan(*rows), b"n"))

        for ours, theirs, length in rows:
            np.testing.assert_array_equal(
                pair.theirs.memory[theirs : theirs + length], pair.ours.memory[ours : ours + length]
            )

    def test_no_ranges_is_done_and_still_notifies(self, pair: Pair) -> None:
        handle = pair.post(pair.plan(), b"nothing but this")
        arrived = pair.finish(handle)

        assert arrived == [Notification(pair.ours.transport.name, b"nothing but this")]
        assert pair.ours.transport.poll(handle) is TransferState.DONE
        pair.ours.transport.release(handle)

    def test_big_range_has_landed_when_its_notification_arrives(self) -> None:
        pair = Pair(self._peer(self.big_bytes), self._peer(self.big_bytes))
        pair.connect()
        pair.ours.memory.view(np.uint64)[:] = np.arange(self.big_bytes // 8, dtype=np.uint64)
        for operation in (Operation.WRITE, Operation.READ):
            handle = pair.post(pair.plan((0, 0, self.big_bytes)), b"big", operation)

            def noticed(handle: TransferHandle = handle) -> bool:
                pair.ours.transport.poll(handle)
                return bool(pair.theirs.transport.notifications())

            wait_until(noticed)

            np.testing.assert_array_equal(pair.theirs.memory, pair.ours.memory)
            pair.finish(handle, num_notifications=0)
            pair.theirs.memory[::512] += 1  # the READ has something to bring
        pair.close()

    # -- notifications ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "payload",
        [b"\x00", "передача ✓".encode(), bytes(range(256)), b"x" * 65536],
        ids=["nul", "unicode", "binary", "64KiB"],
    )
    @pytest.mark.parametrize("length", [0, 64])
    def test_notification_payload_arrives_unchanged(self, pair: Pair, payload: bytes, length: int) -> None:
        plan = pair.plan((0, 0, length)) if length else pair.plan()

        assert pair.finish(pair.post(plan, payload))[0].payload == payload

    def test_empty_notification_is_not_delivered(self, pair: Pair) -> None:
        quiet = pair.finish(
            pair.post(pair.plan((0, 0, 64)), b""), pair.post(pair.plan(), b""), num_notifications=0
        )
        after = pair.finish(pair.post(pair.plan((0, 0, 64)), b"after"))

        assert [each.payload for each in quiet + after] == [b"after"]

    def test_each_notification_arrives_only_after_its_own_data(self, pair: Pair) -> None:
        pair.ours.memory[:] = 255
        num, size = 32, 32768
        handles = [
            pair.post(pair.plan((index * size, index * size, size)), bytes([index])) for index in range(num)
        ]
        seen: list[int] = []

        def progress() -> bool:
            for handle in reversed(handles):
                pair.ours.transport.poll(handle)
                for notification in pair.theirs.transport.notifications():
                    index = notification.payload[0]
                    assert pair.theirs.memory[index * size : (index + 1) * size].all(), f"{index} came early"
                    seen.append(index)
            return len(seen) >= num

        wait_until(progress)

        assert sorted(seen) == list(range(num))

    # -- several at once ----------------------------------------------------------------------------------------------

    def test_concurrent_transfers_are_independent_of_the_polling_order(self, pair: Pair) -> None:
        pair.ours.fill(7)
        order = np.random.default_rng(8).permutation(16)
        handles = [pair.post(pair.plan((i * 4096, i * 8192, 4096)), b"%d" % i) for i in range(16)]
        arrived = pair.finish(*(handles[i] for i in order), num_notifications=16)

        assert len(set(handles)) == 16
        assert sorted(int(each.payload) for each in arrived) == list(range(16))
        for i in range(16):
            np.testing.assert_array_equal(
                pair.theirs.memory[i * 8192 : i * 8192 + 4096], pair.ours.memory[i * 4096 : (i + 1) * 4096]
            )

    def test_both_directions_at_once(self, pair: Pair) -> None:
        half = BUFFER_BYTES // 2
        pair.ours.fill(9)
        pair.theirs.fill(10)
        other = pair.swapped()
        sent_ours, sent_theirs = pair.ours.memory[:half].copy(), pair.theirs.memory[:half].copy()
        there = pair.post(pair.plan((0, half, half)), b"there")
        back = other.post(other.plan((0, half, half)), b"back")
        arrived: list[bytes] = []

        def progress() -> bool:
            states = [pair.ours.transport.poll(there), pair.theirs.transport.poll(back)]
            for peer in (pair.ours, pair.theirs):
                arrived.extend(each.payload for each in peer.transport.notifications())
            return len(arrived) == 2 and TransferState.PENDING not in states

        wait_until(progress)

        assert sorted(arrived) == [b"back", b"there"]
        np.testing.assert_array_equal(pair.theirs.memory[half:], sent_ours)
        np.testing.assert_array_equal(pair.ours.memory[half:], sent_theirs)

    def test_target_that_never_connected_back_is_still_written_and_told(self, strangers: Pair) -> None:
        strangers.ours.fill(11)
        strangers.ours.transport.connect(strangers.theirs.transport.metadata())
        arrived = strangers.finish(strangers.post(strangers.plan((0, 0, 4096)), b"one way"))

        assert arrived == [Notification(strangers.ours.transport.name, b"one way")]
        np.testing.assert_array_equal(strangers.theirs.memory[:4096], strangers.ours.memory[:4096])

    # -- handles ------------------------------------------------------------------------------------------------------

    def test_unknown_handle_is_refused(self, pair: Pair) -> None:
        with pytest.raises(UnknownHandle):
            pair.ours.transport.poll(TransferHandle(12345))
        with pytest.raises(UnknownHandle):
            pair.ours.transport.release(TransferHandle(12345))

    def test_released_handle_is_unknown(self, pair: Pair) -> None:
        handle = pair.post(pair.plan((0, 0, 64)), b"n")
        pair.finish(handle)
        pair.ours.transport.release(handle)

        with pytest.raises(UnknownHandle):
            pair.ours.transport.poll(handle)
        with pytest.raises(UnknownHandle):
            pair.ours.transport.release(handle)

    def test_handles_are_never_reused(self, pair: Pair) -> None:
        seen = set()
        for _ in range(20):
            handle = pair.post(pair.plan((0, 0, 64)), b"n")
            pair.finish(handle)
            pair.ours.transport.release(handle)
            seen.add(handle)

        assert len(seen) == 20

    def test_done_stays_done(self, pair: Pair) -> None:
        handle = pair.post(pair.plan((0, 0, 64)), b"n")
        pair.finish(handle)

        assert [pair.ours.transport.poll(handle) for _ in range(3)] == [TransferState.DONE] * 3

    # -- refusals -----------------------------------------------------------------------------------------------------

    def test_unknown_agent_is_unreachable(self, pair: Pair) -> None:
        with pytest.raises(PeerUnreachable):
            pair.ours.transport.post(Operation.WRITE, AgentName("nobody"), pair.plan((0, 0, 64)), b"n")

    @pytest.mark.parametrize("offset", [-64, BUFFER_BYTES - 32, BUFFER_BYTES + (1 << 30)])
    def test_local_range_outside_the_region_is_refused(self, pair: Pair, offset: int) -> None:
        with pytest.raises(UnregisteredRange):
            pair.post(pair.plan((0, 0, 64), (offset, 0, 64)), b"n")

        assert pair.theirs.transport.notifications() == []

    @pytest.mark.parametrize("offset", [-64, BUFFER_BYTES - 32, BUFFER_BYTES + (1 << 30)])
    def test_remote_range_outside_the_region_moves_nothing(self, pair: Pair, offset: int) -> None:
        pair.ours.fill(12)
        with pytest.raises(UnregisteredRange):
            pair.post(pair.plan((0, 0, 64), (0, offset, 64)), b"n")
        arrived = pair.finish(pair.post(pair.plan((0, 64, 64)), b"the next one works"))

        assert [each.payload for each in arrived] == [b"the next one works"]
        assert not pair.theirs.memory[:64].any()

    def test_region_registered_after_the_metadata_needs_new_metadata(self, pair: Pair) -> None:
        more = np.zeros(4096, np.uint8)
        pair.theirs.transport.register([Region(int(more.ctypes.data), 4096, 4096, 4096, 0)])
        offset = int(more.ctypes.data) - pair.theirs.base
        pair.ours.fill(13)
        with pytest.raises(UnregisteredRange):
            pair.post(pair.plan((0, offset, 4096)), b"n")
        pair.ours.transport.connect(pair.theirs.transport.metadata())
        pair.finish(pair.post(pair.plan((0, offset, 4096)), b"n"))

        np.testing.assert_array_equal(more, pair.ours.memory[:4096])

    def test_overlapping_regions_register_and_move(self, pair: Pair) -> None:
        both = np.zeros(8192, np.uint8)
        base = int(both.ctypes.data)
        pair.ours.transport.register(
            [Region(base, 6144, 1024, 2048, 0), Region(base + 1024, 7168, 1024, 2048, 0)]
        )
        both[:] = 7
        offset = base - pair.ours.base
        pair.finish(pair.post(pair.plan((offset, 0, 1024), (offset + 7168, 1024, 1024)), b"n"))

        assert (pair.theirs.memory[:2048] == 7).all()

    # -- connections --------------------------------------------------------------------------------------------------

    def test_connect_returns_the_peers_name_and_is_idempotent(self, strangers: Pair) -> None:
        metadata = strangers.theirs.transport.metadata()
        names = [strangers.ours.transport.connect(metadata) for _ in range(3)]
        handle = strangers.post(strangers.plan((0, 0, 64)), b"n")

        assert names == [strangers.theirs.transport.name] * 3
        assert strangers.ours.transport.connect(metadata) == strangers.theirs.transport.name
        assert len(strangers.finish(handle)) == 1
        assert strangers.ours.transport.poll(handle) is TransferState.DONE

    @pytest.mark.parametrize("junk", [b"", b"x", b"\x00" * 64, b"\xff" * 5000, b"KVBNIXL1\x00\x01aJUNK"])
    def test_junk_metadata_is_unreachable(self, pair: Pair, junk: bytes) -> None:
        with pytest.raises(PeerUnreachable):
            pair.ours.transport.connect(junk)

        assert len(pair.finish(pair.post(pair.plan((0, 0, 64)), b"still works"))) == 1

    def test_truncated_metadata_is_unreachable(self, strangers: Pair) -> None:
        metadata = strangers.theirs.transport.metadata()
        for length in range(len(metadata) // 2):
            with pytest.raises(PeerUnreachable):
                strangers.ours.transport.connect(metadata[:length])

        strangers.ours.transport.connect(metadata)
        assert len(strangers.finish(strangers.post(strangers.plan((0, 0, 64)), b"n"))) == 1

    def test_own_metadata_is_refused(self, pair: Pair) -> None:
        with pytest.raises(PeerUnreachable):
            pair.ours.transport.connect(pair.ours.transport.metadata())

    def test_disconnected_peer_is_unreachable_until_connected_again(self, pair: Pair) -> None:
        pair.finish(pair.post(pair.plan((0, 0, 64)), b"n"))
        pair.ours.transport.disconnect(pair.theirs.transport.name)
        with pytest.raises(PeerUnreachable):
            pair.post(pair.plan((0, 0, 64)), b"n")
        pair.ours.transport.connect(pair.theirs.transport.metadata())

        assert len(pair.finish(pair.post(pair.plan((0, 0, 64)), b"n"))) == 1

    def test_disconnecting_a_stranger_is_ignored(self, pair: Pair) -> None:
        pair.ours.transport.disconnect(AgentName("nobody"))

    def test_closed_peer_is_noticed_and_its_successor_reached(self, pair: Pair) -> None:
        pair.finish(pair.post(pair.plan((0, 0, 64)), b"n"))
        name = pair.theirs.transport.name
        pair.theirs.transport.close()

        def noticed() -> bool:
            try:
                handle = pair.post(pair.plan((0, 0, 64)), b"n")
            except PeerUnreachable:
                return True
            wait_until(lambda: pair.ours.transport.poll(handle) is not TransferState.PENDING)
            return pair.ours.transport.poll(handle) is TransferState.FAILED

        wait_until(noticed)
        pair.ours.fill(14)
        successor = Pair(pair.ours, Peer.start(self.make_transport(name)))
        successor.ours.transport.connect(successor.theirs.transport.metadata())
        successor.finish(successor.post(successor.plan((0, 0, 4096)), b"n"))

        np.testing.assert_array_equal(successor.theirs.memory[:4096], pair.ours.memory[:4096])
        successor.theirs.transport.close()

    # -- closing ------------------------------------------------------------------------------------------------------

    def test_close_is_idempotent_and_final(self, pair: Pair) -> None:
        transport = pair.ours.transport
        handle = pair.post(pair.plan((0, 0, 64)), b"n")
        transport.close()
        transport.close()

        with pytest.raises(TransportError):
            pair.post(pair.plan((0, 0, 64)), b"n")
        with pytest.raises(TransportError):
            transport.metadata()
        with pytest.raises(TransportError):
            transport.notifications()
        with pytest.raises(UnknownHandle):
            transport.poll(handle)
        transport.disconnect(pair.theirs.transport.name)

    def test_name_and_memory_are_what_was_asked(self, pair: Pair) -> None:
        assert pair.ours.transport.name.startswith("agent-")
        assert pair.ours.transport.memory.value == "DRAM"
        assert pair.ours.transport.name in repr(pair.ours.transport)
