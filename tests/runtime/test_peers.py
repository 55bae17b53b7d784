"""Peers that break off, fall silent, change or were never right: what is told to whom, and when blocks may be reused."""

import logging
import socket
from collections.abc import Iterator

import pytest

from kvbaton.base.ids import EngineAddress, EngineId
from kvbaton.protocol.mode import Mode
from kvbaton.runtime.courier import Courier
from kvbaton.testing.proxy import Proxy
from kvbaton.testing.rig import MiniEngine, Shape, agent_name, wait_until
from kvbaton.transport.faults import Hold
from kvbaton.transport.memory import MemoryTransport
from kvbaton.wire.messages import RankAddress
from runtime.world import FAST, World

SETTINGS = {"heartbeat": FAST}
MODES = list(Mode)


@pytest.fixture
def producer(world: World) -> MiniEngine:
    producer = world.engine("p", settings=SETTINGS)
    producer.fill(1)
    return producer


@pytest.fixture
def consumer(world: World) -> MiniEngine:
    return world.engine("d", settings=SETTINGS)


@pytest.fixture
def proxy(producer: MiniEngine) -> Iterator[Proxy]:
    """A middleman before the producer's rank."""
    ours = producer.courier.address
    proxy = Proxy(ours.port)
    producer.directory.set_ranks([RankAddress(ours.pp, ours.tp, "127.0.0.1", proxy.port, ours.boot_epoch)])
    yield proxy
    proxy.close()


def in_flight(world: World, producer: MiniEngine, consumer: MiniEngine) -> None:
    """A WRITE is posted and held back by the network."""
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [5])
    producer.prefill("q", "t", [6])
    producer.until(lambda courier: len(courier._flights) == 1)


def consumer_states(courier: Courier) -> list[str]:
    return [intake.consumer.state.name for intake in courier.inbound._by_key.values()]


def producer_states(courier: Courier) -> list[str]:
    return [leg.producer.state.name for job in courier.outbound._jobs.values() for leg in job.legs]


def works(producer: MiniEngine, consumer: MiniEngine, name: str = "later") -> None:
    consumer.receive(name, name, producer.address, [30])
    producer.prefill(name, name, [31])

    assert consumer.wait_received(name, timeout_s=8) == {}
    assert consumer.block(0, 30) == producer.block(0, 31)


# --- connections that break while both processes live -----------------------------------------------------------------


def test_reset_while_a_write_is_in_flight_is_fenced(
    world: World, producer: MiniEngine, consumer: MiniEngine, proxy: Proxy
) -> None:
    in_flight(world, producer, consumer)
    proxy.reset()

    # the producer has dropped the transfer with the connection, so its word is enough
    assert consumer.wait_received("r")["r"].startswith("peer_silent")
    producer.until(lambda courier: courier.outbound.num_legs == 0)
    world.network.release_held()
    assert not any(consumer.block(0, 5))
    works(producer, consumer)


def test_reset_seen_by_the_consumer_only_waits_for_the_write(
    world: World, producer: MiniEngine, consumer: MiniEngine, proxy: Proxy
) -> None:
    in_flight(world, producer, consumer)
    proxy.reset(server=False)
    # it has come back over a new connection and asked the producer to stop
    producer.until(lambda courier: producer_states(courier) == ["DRAINING"])

    assert consumer.collect().received == producer.collect().sent == set()
    world.network.release_held()
    assert consumer.wait_received("r")["r"].startswith("peer_silent")
    works(producer, consumer)


def test_reset_seen_by_the_producer_only_is_found_by_the_heartbeat(
    world: World, producer: MiniEngine, consumer: MiniEngine, proxy: Proxy
) -> None:
    consumer.receive("r", "t", producer.address, [5])
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    proxy.reset(client=False)

    consumer.until(lambda courier: courier.inbound.num_quarantined == 1)
    wait_until(lambda: consumer.courier.take_statistics()["quarantined_handoffs"] == 1)
    proxy.reset(server=False)
    assert consumer.wait_received("r")["r"].startswith("peer_silent")
    works(producer, consumer)


def test_silence_quarantines_and_the_peers_word_frees(
    world: World, producer: MiniEngine, consumer: MiniEngine, proxy: Proxy
) -> None:
    in_flight(world, producer, consumer)
    proxy.stall()
    consumer.until(lambda courier: consumer_states(courier) == ["QUARANTINED"])
    producer.until(lambda courier: producer_states(courier) == ["DRAINING"])

    assert consumer.collect().received == producer.collect().sent == set()
    proxy.resume()
    consumer.until(lambda courier: consumer_states(courier) == ["CANCELLING"])
    assert consumer.collect().received == set()
    world.network.release_held()
    assert consumer.wait_received("r")["r"].startswith("peer_silent")
    works(producer, consumer)


@pytest.mark.parametrize("mode", MODES)
def test_silence_before_anything_was_sent_ends_once_the_peer_speaks(
    producer: MiniEngine, consumer: MiniEngine, proxy: Proxy, mode: Mode
) -> None:
    consumer.receive("r", "t", producer.address, [5], mode=mode)
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    proxy.stall()
    producer.until(lambda courier: courier.outbound.num_legs == 0)
    consumer.until(lambda courier: all(link.peer.state.name != "READY" for link in courier.links.known()))
    proxy.resume()

    assert consumer.wait_received("r")["r"].startswith("peer_silent")


def test_one_engine_under_two_names_serves_both(producer: MiniEngine, consumer: MiniEngine) -> None:
    other = EngineAddress("localhost", producer.directory.port, EngineId("p"))
    consumer.receive("r1", "t1", producer.address, [1])
    consumer.receive("r2", "t2", other, [2])
    producer.prefill("q1", "t1", [11])
    producer.prefill("q2", "t2", [12])

    assert consumer.wait_received("r1", "r2") == {}
    assert consumer.blocks([1, 2]) == producer.blocks([11, 12])


# --- processes that come and go ---------------------------------------------------------------------------------------


def test_restarted_producer_is_used_without_restarting_the_consumer(
    world: World, producer: MiniEngine, consumer: MiniEngine
) -> None:
    works(producer, consumer, "before")
    port = producer.directory.port
    consumer.receive("r", "t", producer.address, [5])
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    producer.close()
    assert "r" in consumer.wait_received("r")
    for n in range(3):
        again = world.engine("p", settings=SETTINGS, port=port)
        again.fill(2 + n)
        works(again, consumer, f"after{n}")
        again.close()


def test_request_for_a_process_that_is_dead_but_not_buried_dials_its_successor(world: World) -> None:
    consumer = world.engine("d", settings={"heartbeat": FAST, "dead_drain_s": 30.0})
    producer = world.engine("p", settings=SETTINGS)
    works(producer, consumer, "before")
    port = producer.directory.port
    producer.close()
    consumer.until(lambda courier: courier.links.draining)
    again = world.engine("p", settings=SETTINGS, port=port)
    again.fill(3)

    works(again, consumer)


def test_lost_machine_is_known_dead_once_its_engine_is_back_elsewhere(
    world: World, producer: MiniEngine, consumer: MiniEngine, proxy: Proxy
) -> None:
    in_flight(world, producer, consumer)
    proxy.stall()  # nothing refuses, nothing answers
    consumer.until(lambda courier: consumer_states(courier) == ["QUARANTINED"])
    proxy.reset(server=False)
    ours = producer.courier.address
    successor = world.engine("p2", engine_id="p", settings=SETTINGS)
    new = successor.courier.address
    producer.directory.set_ranks([RankAddress(ours.pp, ours.tp, new.host, new.port, new.boot_epoch)])

    assert consumer.wait_received("r")["r"].startswith("peer_silent")


def test_vanished_consumer_gives_the_producer_its_blocks_back(
    world: World, producer: MiniEngine, consumer: MiniEngine
) -> None:
    in_flight(world, producer, consumer)
    world.network.kill(world.agent(consumer))
    consumer.courier._stop = True
    consumer.close()

    producer.until(lambda courier: courier.outbound.num_legs == 0)
    assert producer.collect().sent == set()  # another consumer may still come


def test_unreachable_peer_delays_nobody_else(world: World, producer: MiniEngine) -> None:
    consumer = world.engine("d")  # with the usual, long timeouts
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        crowd = [socket.socket() for _ in range(8)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(deaf.getsockname())
        nowhere = EngineAddress("127.0.0.1", deaf.getsockname()[1], EngineId("x"))
        consumer.receive("r-x", "t-x", nowhere, [1])
        for n in range(3):
            works(producer, consumer, f"t{n}")

        assert consumer.collect().received == {"t0", "t1", "t2"}
        assert consumer.wait_received("r-x")["r-x"].startswith("peer_unreachable: no handshake within")
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "", "a" * 300])
def test_nobody_there_fails_with_the_address(consumer: MiniEngine, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    consumer.receive("r", "t", EngineAddress(host, port, EngineId("p")), [1])

    assert consumer.wait_received("r")["r"].startswith("peer_unreachable")


# --- processes that do not fit ----------------------------------------------------------------------------------------


def test_directory_of_another_engine_fails_naming_both(producer: MiniEngine, consumer: MiniEngine) -> None:
    consumer.receive("r", "t", EngineAddress("127.0.0.1", producer.directory.port, EngineId("wanted")), [1])

    failure = consumer.wait_received("r")["r"]
    assert failure.startswith("incompatible")
    assert "'wanted'" in failure
    assert "'p'" in failure


def test_different_fingerprints_are_named_on_both_sides(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    producer = world.engine("p", fingerprint={"model": "tiny", "dtype": "bfloat16"})
    consumer = world.engine("d", fingerprint={"model": "tiny", "dtype": "float16"})
    with caplog.at_level(logging.WARNING):
        consumer.receive("r", "t", producer.address, [1])
        failure = consumer.wait_received("r")["r"]

    assert "dtype differs: ours is float16, the peer's is bfloat16" in failure
    logs = [record for record in caplog.records if "dtype differs" in record.getMessage()]
    assert {record.name for record in logs} == {"kvbaton.runtime.link", "kvbaton.runtime.dial"}
    assert "ours is bfloat16, the peer's is float16" in logs[0].getMessage()


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"tp_size": 2}, "tensor parallel size differs: ours is 1, the peer's is 2"),
        (
            {"shape": Shape(block_bytes=256)},
            "bytes per block of region 0 differs: ours is 512, the peer's is 256",
        ),
        ({"shape": Shape(num_regions=3)}, "number of KV regions differs: ours is 2, the peer's is 3"),
        ({"fingerprint": {}}, "model differs: ours is tiny, the peer's is (absent)"),
    ],
)
def test_peer_that_does_not_fit_is_refused_at_once(
    world: World, consumer: MiniEngine, about: dict[str, object], words: str
) -> None:
    producer = world.engine("p", **about)
    consumer.receive("r", "t", producer.address, [1])

    assert words in consumer.wait_received("r")["r"]


def test_rank_that_is_not_up_fails_with_what_is(producer: MiniEngine, consumer: MiniEngine) -> None:
    producer.directory.set_ranks([])
    consumer.receive("r", "t", producer.address, [1])

    assert "has no rank pp=0 tp=0" in consumer.wait_received("r")["r"]


def test_agent_name_of_a_dead_process_may_come_again(world: World, producer: MiniEngine) -> None:
    name = agent_name("d")
    for n in range(3):
        consumer = world.engine("d", settings=SETTINGS, transport=MemoryTransport(world.network, name))
        works(producer, consumer, f"t{n}")
        consumer.close()
