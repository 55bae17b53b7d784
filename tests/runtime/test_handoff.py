"""A handoff that goes well moves exactly the right bytes and tells each side exactly once, whatever its shape."""

import pytest

from kvbaton.kv.layout import GroupKind
from kvbaton.protocol.mode import Mode
from kvbaton.runtime.observe import HANDOFF_COLUMNS
from kvbaton.testing.rig import MiniEngine, Shape
from kvbaton.transport.faults import Corrupt
from runtime.world import World

MODES = [Mode.PUSH, Mode.PULL]


@pytest.fixture
def pair(world: World) -> tuple[MiniEngine, MiniEngine]:
    producer, consumer = world.engine("p"), world.engine("d")
    producer.fill(1)
    return producer, consumer


@pytest.mark.parametrize("mode", MODES)
def test_handoff_registered_first_moves_exactly_its_blocks(
    pair: tuple[MiniEngine, MiniEngine], mode: Mode
) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [5, 6, 9], mode=mode)
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    producer.prefill("q", "t", [1, 2, 7])

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    assert consumer.blocks([5, 6, 9]) == producer.blocks([1, 2, 7])
    assert not any(any(consumer.block(0, each)) for each in range(64) if each not in (5, 6, 9))


def test_registration_before_its_prefill_ends_the_wait_of_the_producers_engine(
    pair: tuple[MiniEngine, MiniEngine],
) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [5], mode=Mode.PUSH)

    assert producer.courier.wait_results(10)
    assert producer.courier.outbound.num_legs == 1


@pytest.mark.parametrize("mode", MODES)
def test_handoff_registered_after_the_prefill_moves_its_blocks(
    pair: tuple[MiniEngine, MiniEngine], mode: Mode
) -> None:
    producer, consumer = pair
    producer.prefill("q", "t", [1, 2, 7])
    producer.until(lambda courier: courier.outbound.num_leases == 1)
    consumer.receive("r", "t", producer.address, [5, 6, 9], mode=mode)

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    assert consumer.blocks([5, 6, 9]) == producer.blocks([1, 2, 7])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [True, False])
def test_handoff_registered_between_chunks_moves_all_blocks(world: World, mode: Mode, stream: bool) -> None:
    producer = world.engine("p", settings={"stream": stream})
    consumer = world.engine("d")
    producer.fill(1)
    producer.start("q", "t", 96)
    producer.progress("q", 40, [1, 2, 3])
    consumer.receive("r", "t", producer.address, [10, 11, 12, 13, 14, 15], mode=mode)
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    producer.progress("q", 64, [4], first=3)
    producer.progress("q", 96, [8, 7], first=4, ended=True)
    producer.finish("q")

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    assert consumer.blocks([10, 11, 12, 13, 14, 15]) == producer.blocks([1, 2, 3, 4, 8, 7])


@pytest.mark.parametrize("mode", MODES)
def test_registration_tells_the_producer_whether_parts_are_wanted(
    pair: tuple[MiniEngine, MiniEngine], mode: Mode
) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [5], mode=mode)
    producer.until(lambda courier: courier.outbound.num_legs == 1)

    assert (producer.courier.tail_parts(1 << 30, 0) > 1) == (mode is Mode.PUSH)


def test_streaming_sends_final_blocks_before_the_prefill_ends(pair: tuple[MiniEngine, MiniEngine]) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [10, 11, 12, 13])
    producer.start("q", "t", 64)
    producer.progress("q", 40, [1, 2, 3])
    consumer.until(lambda _: consumer.blocks([10, 11]) == producer.blocks([1, 2]))

    # the third block is not final yet
    assert not any(consumer.block(0, 12))
    assert consumer.collect().received == set()
    producer.progress("q", 64, [4], first=3, ended=True)
    producer.finish("q")
    assert consumer.wait_received("r") == {}
    assert consumer.blocks([12, 13]) == producer.blocks([3, 4])


def test_whole_request_mode_sends_nothing_before_the_prefill_ends(world: World) -> None:
    producer, consumer = world.engine("p", settings={"stream": False}), world.engine("d")
    producer.fill(1)
    consumer.receive("r", "t", producer.address, [10, 11])
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    producer.start("q", "t", 32)
    producer.progress("q", 16, [1])
    producer.progress("q", 32, [2], first=1, ended=True)
    producer.finish("q")

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    record = producer.courier.take_statistics()["handoffs"][0]
    assert record[:3] == ["producer", "push", "committed"]
    assert record[5] == 1  # one transfer


@pytest.mark.parametrize("mode", MODES)
def test_verified_handoff_commits_when_nothing_was_damaged(world: World, mode: Mode) -> None:
    producer, consumer = world.engine("p"), world.engine("d", settings={"verify": True})
    producer.fill(1)
    consumer.receive("r", "t", producer.address, [5, 6], mode=mode)
    producer.prefill("q", "t", [2, 1])

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    record = consumer.courier.take_statistics()["handoffs"][0]
    assert record[HANDOFF_COLUMNS.index("checksums")] == 4  # two blocks in two regions


@pytest.mark.parametrize("mode", MODES)
def test_verified_handoff_fails_when_a_byte_flips_on_the_way(world: World, mode: Mode) -> None:
    producer, consumer = world.engine("p"), world.engine("d", settings={"verify": True})
    producer.fill(1)
    world.network.inject(Corrupt(700))
    consumer.receive("r", "t", producer.address, [5, 6], mode=mode)
    producer.prefill("q", "t", [2, 1])

    failed = consumer.wait_received("r")
    assert failed["r"].startswith("checksum: 1 of 4 block checksums differ")
    producer.wait_sent("q")


@pytest.mark.parametrize("mode", MODES)
def test_prefix_cached_consumer_gets_only_what_it_lacks(
    pair: tuple[MiniEngine, MiniEngine], mode: Mode
) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [5, 6], first=2, mode=mode)
    producer.prefill("q", "t", [1, 2, 3, 4])

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    assert consumer.blocks([5, 6]) == producer.blocks([3, 4])


@pytest.mark.parametrize("mode", MODES)
def test_several_groups_with_state_arrive_whole(world: World, mode: Mode) -> None:
    shape = Shape(kinds=(GroupKind.ATTENTION, GroupKind.STATE, GroupKind.ATTENTION))
    producer, consumer = world.engine("p", shape=shape), world.engine("d", shape=shape)
    producer.fill(1)
    theirs, ours = [[1, 2, 3], [9], [4, 5, 6]], [[21, 22, 23], [30], [24, 26, 25]]
    consumer.receive("r", "t", producer.address, ours, mode=mode)
    producer.start("q", "t", 48)
    producer.progress("q", 20, [[1, 2], [9], [4, 5]])
    producer.progress("q", 48, [[3], [], [6]], first=2)
    producer.ask(lambda _: None)
    consumer.until(lambda _: mode is Mode.PULL or consumer.blocks([21, 22]) == producer.blocks([1, 2]))

    assert not any(consumer.block(1, 30))  # state is final only at the end
    producer.progress("q", 48, [[], [], []], first=3, ended=True)
    producer.finish("q")
    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    for group in range(3):
        assert consumer.blocks(ours[group], group) == producer.blocks(theirs[group], group)


@pytest.mark.parametrize("mode", MODES)
def test_handoff_of_no_blocks_commits(pair: tuple[MiniEngine, MiniEngine], mode: Mode) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [], mode=mode, num_tokens=16)
    producer.prefill("q", "t", [1])

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")


@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_concurrent_handoffs_all_commit(world: World, mode: Mode) -> None:
    shape = Shape(num_blocks=1024, block_bytes=64)
    producer, consumer = world.engine("p", shape=shape), world.engine("d", shape=shape)
    producer.fill(1)
    for i in range(200):
        if i % 2:
            producer.prefill(f"q{i}", f"t{i}", range(4 * i, 4 * i + 4))
        consumer.receive(f"r{i}", f"t{i}", producer.address, range(1020 - 4 * i, 1024 - 4 * i), mode=mode)
        if not i % 2:
            producer.prefill(f"q{i}", f"t{i}", range(4 * i, 4 * i + 4))

    assert consumer.wait_received(*(f"r{i}" for i in range(200))) == {}
    producer.wait_sent(*(f"q{i}" for i in range(200)))
    for i in range(200):
        assert consumer.blocks(range(1020 - 4 * i, 1024 - 4 * i)) == producer.blocks(range(4 * i, 4 * i + 4))


def test_three_consumers_and_two_producers_do_not_mix(world: World) -> None:
    producers = [world.engine(f"p{i}") for i in range(2)]
    consumers = [world.engine(f"d{i}") for i in range(3)]
    for seed, producer in enumerate(producers):
        producer.fill(seed)
    for d, consumer in enumerate(consumers):
        for p, producer in enumerate(producers):
            for n, mode in enumerate(MODES):
                name = f"{d}{p}{n}"
                consumer.receive(name, name, producer.address, [10 * p + n, 30 + 10 * p + n], mode=mode)
                producer.prefill(name, name, [d, 10 + d])

    for d, consumer in enumerate(consumers):
        names = [f"{d}{p}{n}" for p in range(2) for n in range(2)]
        assert consumer.wait_received(*names) == {}
        for p, producer in enumerate(producers):
            for n in range(2):
                assert consumer.blocks([10 * p + n, 30 + 10 * p + n]) == producer.blocks([d, 10 + d])


@pytest.mark.parametrize("mode", MODES)
def test_two_engines_hand_off_both_ways_at_once(world: World, mode: Mode) -> None:
    left, right = world.engine("left"), world.engine("right")
    left.fill(1)
    right.fill(2)
    left.receive("r", "to-left", right.address, [1, 2], mode=mode)
    right.receive("r", "to-right", left.address, [1, 2], mode=mode)
    left.prefill("q", "to-right", [11, 12])
    right.prefill("q", "to-left", [11, 12])

    assert left.wait_received("r") == right.wait_received("r") == {}
    left.wait_sent("q")
    right.wait_sent("q")
    assert left.blocks([1, 2]) == right.blocks([11, 12])
    assert right.blocks([1, 2]) == left.blocks([11, 12])
