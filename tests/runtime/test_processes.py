"""Real processes over NIXL that are killed, frozen, thawed and restarted in the middle of a WRITE (S1, S2, S4, S8)."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvbaton.kv.layout import MemoryKind
from kvbaton.protocol.mode import Mode
from kvbaton.testing.rig import MiniEngine, Shape, agent_name, wait_until
from kvbaton.transport.base import Transport
from runtime.child import Child
from runtime.world import FAST, World

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]

SHAPE = Shape(num_blocks=256, block_bytes=1 << 18)  # 128 MiB in two regions: enough to be caught half way
IDS = list(range(256))
NETWORKS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}


def nixl(name: str) -> Transport:
    from kvbaton.transport.nixl import NixlTransport

    return NixlTransport(agent_name(name), MemoryKind.DRAM)


@pytest.fixture(params=NETWORKS)
def env(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for key, value in NETWORKS[request.param].items():
        monkeypatch.setenv(key, value)
    return NETWORKS[request.param]


def child(name: str, env: dict[str, str], port: int = 0) -> Child:
    return Child(name, num_blocks=SHAPE.num_blocks, block_bytes=SHAPE.block_bytes, env=env, port=port)


def engine(world: World, name: str) -> MiniEngine:
    settings = {"heartbeat": FAST, "dead_drain_s": 0.3, "lease_s": 2.0}
    return world.engine(name, transport=nixl(name), shape=SHAPE, settings=settings)


@pytest.fixture
def producer(env: dict[str, str]) -> Iterator[Child]:
    with child("p", env) as producer:
        producer.tell("fill", seed=1)
        producer.hear("filled")
        yield producer


def landed(consumer: MiniEngine) -> int:
    """Blocks of the first region that hold something; cheap enough to ask often."""
    return int(consumer.memory[0][0][:: SHAPE.block_bytes].any()) and int(
        (consumer.memory[0][0][:: SHAPE.block_bytes] != 0).sum()
    )


def poisoned(consumer: MiniEngine) -> bool:
    return all(bool((memory == 0xEE).all()) for memory in consumer.memory[0])


def poison(consumer: MiniEngine) -> None:
    for memory in consumer.memory[0]:
        memory[:] = 0xEE


def catch_in_the_act(producer: Child, consumer: MiniEngine, number: signal.Signals) -> None:
    """Stop or kill the producer as soon as a first byte is here."""
    consumer.receive("r", "t", producer.address, IDS)
    consumer.until(lambda courier: bool(courier.links.known()) and courier.links.known()[0].peer.ready)
    producer.tell("prefill", request="q", transfer="t", ids=IDS)
    wait_until(lambda: landed(consumer) > 0, timeout_s=30)
    producer.signal(number)


def test_killed_producer_writes_nothing_after_the_failure_was_reported(world: World, producer: Child) -> None:
    consumer = engine(world, "d")
    catch_in_the_act(producer, consumer, signal.SIGKILL)
    died_s = time.monotonic()
    failed = consumer.wait_received("r")
    poison(consumer)

    if failed:  # on a fast path it may have been too late to stop anything
        assert failed["r"].startswith(("peer_lost", "peer_silent"))
        assert time.monotonic() - died_s < 15
        threading.Event().wait(2)  # what a late packet would take
        assert poisoned(consumer)


def test_frozen_producer_quarantines_until_it_thaws(world: World, producer: Child) -> None:
    consumer = engine(world, "d")
    catch_in_the_act(producer, consumer, signal.SIGSTOP)
    try:
        consumer.until(lambda courier: courier.inbound.num_quarantined == 1 or not len(courier.inbound))
        quarantined = bool(consumer.ask(lambda courier: courier.inbound.num_quarantined))
        if quarantined:
            assert consumer.collect().received == set()
    finally:
        producer.signal(signal.SIGCONT)
    failed = consumer.wait_received("r", timeout_s=30)
    poison(consumer)

    if quarantined:
        assert failed["r"].startswith("peer_silent")
    consumer.ask(lambda _: None)
    threading.Event().wait(1)
    assert poisoned(consumer)
    consumer.receive("r2", "t2", producer.address, [1, 2])
    producer.tell("prefill", request="q2", transfer="t2", ids=[3, 4])
    assert consumer.wait_received("r2") == {}


@pytest.mark.parametrize("env", ["tcp"], indirect=True)
def test_producer_killed_while_frozen_frees_the_quarantine(world: World, producer: Child) -> None:
    consumer = engine(world, "d")
    catch_in_the_act(producer, consumer, signal.SIGSTOP)
    consumer.until(lambda courier: courier.inbound.num_quarantined == 1 or not len(courier.inbound))
    producer.kill()

    consumer.wait_received("r")
    poison(consumer)
    threading.Event().wait(2)
    assert poisoned(consumer)


@pytest.mark.parametrize("env", ["default"], indirect=True)
@pytest.mark.parametrize("mode", list(Mode))
def test_restarted_producer_serves_the_next_request(
    world: World, producer: Child, env: dict[str, str], mode: Mode
) -> None:
    consumer = engine(world, "d")
    consumer.receive("r1", "t1", producer.address, [1, 2], mode=mode)
    producer.tell("prefill", request="q1", transfer="t1", ids=[3, 4])
    assert consumer.wait_received("r1") == {}
    producer.kill()
    with child("p", env, port=producer.port) as again:
        again.tell("fill", seed=5)
        again.hear("filled")
        started_s = time.monotonic()
        again.tell("prefill", request="q2", transfer="t2", ids=[3, 4])
        consumer.receive("r2", "t2", again.address, [5, 6], mode=mode)

        assert consumer.wait_received("r2") == {}
        assert time.monotonic() - started_s < 10  # a second or two, on a machine with time to spare
        assert consumer.blocks([5, 6]) != consumer.blocks([1, 2])


@pytest.mark.parametrize("env", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    ("mode", "number"),
    [(Mode.PUSH, signal.SIGKILL), (Mode.PUSH, signal.SIGSTOP), (Mode.PULL, signal.SIGKILL)],
)
def test_lost_consumer_gives_the_producer_its_blocks_back(
    world: World, env: dict[str, str], mode: Mode, number: signal.Signals
) -> None:
    producer = engine(world, "p")
    producer.fill(1)
    with child("d", env) as consumer:
        address = producer.address
        consumer.tell(
            "receive",
            request="r",
            transfer="t",
            producer=[address.host, address.port, address.engine_id],
            ids=IDS,
            mode=mode.value,
        )
        producer.until(lambda courier: courier.outbound.num_legs == 1)
        producer.prefill("q", "t", IDS)
        producer.until(
            lambda courier: (
                len(courier._flights) > 0 or courier.outbound.has_sealed or not courier.outbound.num_legs
            )
        )
        consumer.signal(number)
        if number is signal.SIGSTOP:
            producer.until(lambda courier: courier.links.known()[0].peer.state.name == "SILENT")
            consumer.kill()

        # the lease lets another consumer come, then ends
        producer.wait_sent("q", timeout_s=30)
        assert producer.ask(lambda courier: (len(courier._flights), courier.outbound.num_legs)) == (0, 0)


@pytest.mark.parametrize("env", ["tcp"], indirect=True)
def test_frozen_consumer_thaws_to_a_clean_failure_or_a_commit(world: World, env: dict[str, str]) -> None:
    producer = engine(world, "p")
    producer.fill(1)
    with child("d", env) as consumer:
        address = producer.address
        consumer.tell(
            "receive",
            request="r",
            transfer="t",
            producer=[address.host, address.port, address.engine_id],
            ids=IDS,
            mode="push",
        )
        producer.until(lambda courier: courier.outbound.num_legs == 1)
        producer.prefill("q", "t", IDS)
        consumer.signal(signal.SIGSTOP)
        producer.until(
            lambda courier: (
                not courier.outbound.num_legs or courier.links.known()[0].peer.state.name == "SILENT"
            )
        )
        consumer.signal(signal.SIGCONT)

        assert consumer.hear("received")["received"] == ["r"]
        producer.wait_sent("q", timeout_s=30)
