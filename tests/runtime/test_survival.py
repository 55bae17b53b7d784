"""An error nobody planned for costs one handoff, not the courier, and never frees blocks that may still be in use."""

import errno
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.base.errors import ConfigError, TransportError
from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.plan import Plan
from kvbaton.protocol.mode import Mode
from kvbaton.testing.rig import MiniEngine, agent_name
from kvbaton.transport.base import Notification, Operation, TransferState
from kvbaton.transport.faults import Hold
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport
from runtime.world import World


class Moody(MemoryTransport):
    """Raises what it is told to, so many times."""

    def __init__(self, network: MemoryNetwork, name: AgentName) -> None:
        super().__init__(network, name)
        self.moods: dict[str, list[Exception]] = {}
        self.num_raised = 0

    def _maybe(self, call: str) -> None:
        if self.moods.get(call):
            self.num_raised += 1
            raise self.moods[call].pop()

    def post(self, operation: Operation, agent: AgentName, plan: Plan, notification: bytes) -> TransferHandle:
        self._maybe("post")
        handle = super().post(operation, agent, plan, notification)
        self._maybe("post-after")
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        self._maybe("poll")
        return super().poll(handle)

    def release(self, handle: TransferHandle) -> None:
        super().release(handle)
        self._maybe("release")

    def notifications(self) -> list[Notification]:
        self._maybe("notifications")
        return super().notifications()

    def close(self) -> None:
        super().close()
        self._maybe("close")


Moodies = tuple[MiniEngine, MiniEngine, Moody, Moody]


@pytest.fixture
def moodies(world: World) -> Moodies:
    p, d = (Moody(world.network, agent_name(name)) for name in "pd")
    producer, consumer = world.engine("p", transport=p), world.engine("d", transport=d)
    producer.fill(1)
    return producer, consumer, p, d


def works(producer: MiniEngine, consumer: MiniEngine, name: str = "later") -> None:
    consumer.receive(name, name, producer.address, [30])
    producer.prefill(name, name, [31])

    assert consumer.wait_received(name) == {}
    assert consumer.block(0, 30) == producer.block(0, 31)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("error", [TransportError("injected"), RuntimeError("injected"), MemoryError()])
@pytest.mark.parametrize("call", ["post", "post-after", "poll"])
def test_transport_error_fails_one_handoff_on_both_sides(
    moodies: Moodies, mode: Mode, error: Exception, call: str
) -> None:
    producer, consumer, p, d = moodies
    (p if mode is Mode.PUSH else d).moods[call] = [error]
    consumer.receive("r", "t", producer.address, [5], mode=mode)
    producer.prefill("q", "t", [6])

    failed = consumer.wait_received("r")
    if call != "post-after" or not isinstance(
        error, TransportError
    ):  # a refusal after the post breaks the contract
        assert failed["r"].startswith("transfer_failed")
    producer.until(lambda courier: courier.outbound.num_legs == 0)
    works(producer, consumer)


@pytest.mark.parametrize("error", [TransportError("injected"), RuntimeError("injected")])
def test_notifications_that_cannot_be_read_for_a_while_are_read_later(
    moodies: Moodies, error: Exception
) -> None:
    producer, consumer, p, d = moodies
    p.moods["notifications"] = [error] * 20
    d.moods["notifications"] = [error] * 20
    consumer.receive("r", "t", producer.address, [5])
    producer.prefill("q", "t", [6])

    assert consumer.wait_received("r") == {}
    assert d.num_raised == 20


def test_release_error_is_only_logged(moodies: Moodies) -> None:
    producer, consumer, p, _ = moodies
    p.moods["release"] = [RuntimeError("injected")]
    works(producer, consumer, "t")

    assert p.num_raised == 1


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("mode", list(Mode))
def test_checksum_error_fails_the_handoff(moodies: Moodies, world: World, side: str, mode: Mode) -> None:
    producer, _, _, _ = moodies
    consumer = world.engine("v", settings={"verify": True})

    def broken(group: int, ids: npt.NDArray[np.int64]) -> bytes:
        raise RuntimeError("injected")

    (producer if side == "producer" else consumer).courier.checksum = broken
    consumer.receive("r", "t", producer.address, [5], mode=mode)
    producer.prefill("q", "t", [6])

    assert "r" in consumer.wait_received("r")
    producer.until(lambda courier: courier.outbound.num_legs == 0)
    works(producer, moodies[1])


def test_unknown_command_is_logged_and_the_next_is_obeyed(
    moodies: Moodies, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer, _, _ = moodies
    for junk in (object(), 17, None, "close"):
        consumer.courier.submit([junk])  # type: ignore[list-item]
    works(producer, consumer)

    assert caplog.text.count("failed") >= 4


def test_command_that_raises_is_logged_and_the_next_is_obeyed(moodies: Moodies) -> None:
    producer, consumer, _, _ = moodies
    producer.start("q", "t", 16)
    producer.progress("q", 16, [1], first=7)  # a gap in the block table
    producer.progress("nobody", 16, [1])
    producer.finish("nobody")
    works(producer, consumer)


@pytest.mark.parametrize("path", ["missing/trace.jsonl", "."])
def test_unwritable_trace_file_is_an_error_at_start(world: World, tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.engine("p", settings={"trace_file": tmp_path / path})

    assert caught.value.key == "trace_file"


def test_trace_file_that_fills_up_stops_tracing_only(world: World) -> None:
    full = Path("/dev/full")
    producer, consumer = (
        world.engine("p", settings={"trace_file": full}),
        world.engine("d", settings={"trace_file": full}),
    )
    producer.fill(1)
    works(producer, consumer, "one")
    works(producer, consumer, "two")
    producer.wait_sent("one", "two")

    assert len(consumer.courier.take_statistics()["handoffs"]) == 2


def test_trace_holds_one_line_per_side(world: World, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    producer, consumer = (
        world.engine("p", settings={"trace_file": trace}),
        world.engine("d", settings={"trace_file": trace}),
    )
    works(producer, consumer, "t")
    producer.wait_sent("t")
    consumer.close()
    producer.close()

    assert len(trace.read_text().splitlines()) == 2


def test_statistics_nobody_takes_do_not_grow_for_ever(world: World) -> None:
    from kvbaton.runtime.observe import MAX_RECORDS, Observer

    producer = world.engine("p")
    observer: Observer = producer.courier.observer
    logging.getLogger("kvbaton.runtime.observe").setLevel(logging.ERROR)
    consumer = world.engine("d")
    works(producer, consumer)
    producer.wait_sent("later")
    record = observer._records[0]
    for _ in range(MAX_RECORDS + 10):
        observer.record(record)

    assert len(producer.courier.take_statistics()["handoffs"]) == MAX_RECORDS


def test_memory_that_cannot_be_registered_is_an_error_at_start(world: World) -> None:
    class Refusing(MemoryTransport):
        def register(self, regions: object) -> None:
            raise TransportError(f"no memory ({errno.ENOMEM})")

    with pytest.raises(TransportError, match="no memory"):
        world.engine("p", transport=Refusing(world.network, agent_name("p")))


# --- shutting down ----------------------------------------------------------------------------------------------------


def test_close_ends_writes_in_flight_and_tells_the_consumer(world: World, moodies: Moodies) -> None:
    producer, consumer, _, _ = moodies
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [5, 6])
    producer.start("q", "t", 32)
    producer.progress("q", 16, [7])
    producer.until(lambda courier: len(courier._flights) == 1)
    producer.courier._stop = True
    producer.courier._inbox.rouse()
    producer.courier._thread.join(0.1)

    assert producer.courier._thread.is_alive()  # it waits for its WRITE
    assert consumer.collect().received == set()
    world.network.release_held()
    producer.close()
    assert consumer.wait_received("r")["r"].startswith("peer_lost: the producer is shutting down")
    assert consumer.block(0, 5) == producer.block(0, 7)


def test_consumer_that_closes_frees_the_producer(moodies: Moodies) -> None:
    producer, consumer, _, _ = moodies
    consumer.receive("r", "t", producer.address, [5])
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    consumer.close()

    producer.until(lambda courier: courier.outbound.num_legs == 0 and courier.links.known() == [])


@pytest.mark.parametrize("mood", [None, RuntimeError("injected")])
def test_close_is_idempotent_and_leaves_nothing(moodies: Moodies, mood: Exception | None) -> None:
    producer, consumer, p, _ = moodies
    works(producer, consumer)
    p.moods["close"] = [mood] if mood else []
    for _ in range(3):
        producer.close()

    assert not producer.courier._thread.is_alive()
    assert producer.courier._sock.fileno() == -1
    producer.courier.submit([])
    producer.courier.call_soon(lambda: None)  # too late, but harmless
