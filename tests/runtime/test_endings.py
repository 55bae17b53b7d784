"""Every handoff ends, within its time and with its reason, whoever gives up and whenever (S3, S4, S5)."""

import pytest

from kvbaton.base.ids import HandoffKey, RequestId, TransferId
from kvbaton.protocol.mode import Mode
from kvbaton.runtime import commands as c
from kvbaton.testing.rig import DIGEST, MiniEngine
from kvbaton.transport.faults import Fail, Hold, LateNotification, Refuse, RepeatNotification
from runtime.world import World

MODES = [Mode.PUSH, Mode.PULL]
Pair = tuple[MiniEngine, MiniEngine]


@pytest.fixture
def pair(world: World) -> Pair:
    producer, consumer = world.engine("p"), world.engine("d")
    producer.fill(1)
    return producer, consumer


def cancel(consumer: MiniEngine, request: str = "r") -> None:
    consumer.courier.submit([c.CancelReceive(RequestId(request))])


def abort(producer: MiniEngine, *, held: bool, request: str = "q", transfer: str = "t") -> None:
    key = HandoffKey(TransferId(transfer))
    producer.courier.submit([c.PrefillAborted(RequestId(request), key, held)])


def registered(producer: MiniEngine) -> None:
    producer.until(lambda courier: courier.outbound.num_legs > 0)


def all_quiet(*engines: MiniEngine) -> None:
    for engine in engines:
        engine.until(
            lambda courier: courier.outbound.num_legs == len(courier.inbound) == len(courier._flights) == 0
        )


# --- who comes late, early or never -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_registration_nobody_prefills_for_ends_after_park_s(world: World, mode: Mode) -> None:
    producer, consumer = world.engine("p", settings={"park_s": 0.1}), world.engine("d")
    consumer.receive("r", "t", producer.address, [1], mode=mode)

    assert consumer.wait_received("r")["r"].startswith("unknown_transfer")
    all_quiet(producer, consumer)


def test_prefill_nobody_registers_for_is_freed_after_its_lease(world: World) -> None:
    producer = world.engine("p", settings={"lease_s": 0.1})
    producer.prefill("q", "t", [1])

    producer.wait_sent("q")
    assert producer.ask(lambda courier: courier.outbound.num_leases) == 0


@pytest.mark.parametrize("mode", MODES)
def test_registration_after_the_lease_has_expired_is_refused(world: World, mode: Mode) -> None:
    producer, consumer = world.engine("p", settings={"lease_s": 0.05}), world.engine("d")
    producer.prefill("q", "t", [1])
    producer.wait_sent("q")
    consumer.receive("r", "t", producer.address, [1], mode=mode)

    assert consumer.wait_received("r")["r"].startswith("lease_expired")


@pytest.mark.parametrize("mode", MODES)
def test_handoff_that_outlives_its_ttl_is_cancelled_on_both_sides(pair: Pair, mode: Mode) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [1], mode=mode, ttl_s=0.2)
    registered(producer)

    assert consumer.wait_received("r")["r"].startswith("deadline")
    all_quiet(producer, consumer)


def test_release_before_the_prefill_starts_frees_it_at_its_end(pair: Pair) -> None:
    producer, consumer = pair
    consumer.courier.submit([c.DeclineTransfer(HandoffKey(TransferId("t")), producer.address)])
    producer.until(lambda courier: ("t", 0) in courier.outbound._gone)
    producer.prefill("q", "t", [1])

    producer.wait_sent("q", timeout_s=5)


def test_decline_after_the_prefill_frees_it_at_once(pair: Pair) -> None:
    producer, consumer = pair
    producer.prefill("q", "t", [1])
    consumer.courier.submit([c.DeclineTransfer(HandoffKey(TransferId("t")), producer.address)])

    producer.wait_sent("q", timeout_s=5)


def test_decline_reaches_a_producer_that_comes_up_later(world: World) -> None:
    producer, consumer = world.engine("p"), world.engine("d")
    ranks = producer.directory._ranks
    producer.directory.set_ranks([])
    producer.prefill("q", "t", [1])
    consumer.courier.submit([c.DeclineTransfer(HandoffKey(TransferId("t")), producer.address)])
    consumer.until(lambda courier: any(link.peer.state.name == "WAITING" for link in courier.links.known()))
    producer.directory.set_ranks(ranks)

    producer.wait_sent("q", timeout_s=5)


# --- who comes twice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_newer_epoch_takes_the_prefill_over(world: World, mode: Mode) -> None:
    producer, first, second = world.engine("p"), world.engine("d1"), world.engine("d2")
    producer.fill(1)
    first.receive("r", "t", producer.address, [1], mode=mode, epoch=1)
    registered(producer)
    second.receive("r", "t", producer.address, [2], mode=mode, epoch=2)

    assert first.wait_received("r")["r"].startswith("stale_epoch")
    producer.prefill("q", "t", [9])
    assert second.wait_received("r") == {}
    assert second.block(0, 2) == producer.block(0, 9)
    producer.wait_sent("q")


def test_newer_epoch_takes_over_while_a_write_is_in_flight(world: World) -> None:
    producer, first, second = world.engine("p"), world.engine("d1"), world.engine("d2")
    producer.fill(1)
    world.network.inject(Hold(), target=world.agent(first))
    first.receive("r", "t", producer.address, [1], epoch=1)
    producer.prefill("q", "t", [9])
    producer.until(lambda courier: len(courier._flights) == 1)
    second.receive("r", "t", producer.address, [2], epoch=2)

    assert second.wait_received("r") == {}
    assert first.collect().received == producer.collect().sent == set()  # S1 and S2: that WRITE has not ended
    world.network.release_held()
    assert first.wait_received("r")["r"].startswith("stale_epoch")
    producer.wait_sent("q")


@pytest.mark.parametrize("mode", MODES)
def test_second_consumer_of_one_epoch_is_refused(world: World, mode: Mode) -> None:
    producer, first, second = world.engine("p"), world.engine("d1"), world.engine("d2")
    first.receive("r", "t", producer.address, [1], mode=mode)
    registered(producer)
    second.receive("r", "t", producer.address, [1], mode=mode)

    assert second.wait_received("r")["r"].startswith("already_claimed")
    producer.prefill("q", "t", [9])
    assert first.wait_received("r") == {}


def test_transfer_received_twice_by_one_engine_fails_the_second(pair: Pair) -> None:
    producer, consumer = pair
    consumer.receive("r1", "t", producer.address, [1])
    consumer.receive("r2", "t", producer.address, [2])
    producer.prefill("q", "t", [9])

    assert "already" in consumer.wait_received("r2")["r2"]
    assert consumer.wait_received("r1") == {}


def test_transfer_prefilled_twice_hands_off_the_first_and_frees_both(pair: Pair) -> None:
    producer, consumer = pair
    producer.start("q1", "t", 16)
    producer.prefill("q2", "t", [8])
    producer.wait_sent("q2")
    producer.progress("q1", 16, [9], ended=True)
    producer.finish("q1")
    consumer.receive("r", "t", producer.address, [1])

    assert consumer.wait_received("r") == {}
    assert consumer.block(0, 1) == producer.block(0, 9)
    producer.wait_sent("q1")


def test_transfer_id_that_comes_again_later_is_a_new_handoff(pair: Pair) -> None:
    producer, consumer = pair
    for n in range(3):
        consumer.receive(f"r{n}", f"t{n % 2}", producer.address, [n])
        registered(producer) if n < 2 else None
        producer.prefill(f"q{n}", f"t{n % 2}", [9 + n])
        outcome = consumer.wait_received(f"r{n}")
        producer.wait_sent(f"q{n}")

        # ids are used once; a second use must fail, never hand over something else
        assert (outcome == {}) is (n < 2)


# --- prompts that are not the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"num_tokens": 31}, "31 tokens"),
        ({"digest": b"another"}, "other tokens"),
        ({"ids": [1, 2, 3], "num_tokens": 32}, "3 blocks wanted"),
    ],
)
def test_prompt_that_differs_is_refused_with_both_values(
    pair: Pair, mode: Mode, ours: dict[str, object], words: str
) -> None:
    producer, consumer = pair
    wanted: dict[str, object] = {"ids": [1, 2], "num_tokens": 32, "digest": DIGEST}
    consumer.receive("r", "t", producer.address, mode=mode, **{**wanted, **ours})  # type: ignore[arg-type]
    producer.prefill("q", "t", [8, 9])

    failure = consumer.wait_received("r")["r"]
    assert failure.startswith("incompatible")
    assert words in failure


# --- aborts in every phase --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_consumer_aborts_before_the_producer_can_be_reached(pair: Pair, mode: Mode) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [1], mode=mode)
    cancel(consumer)

    assert consumer.wait_received("r")["r"].startswith("aborted")
    producer.until(lambda courier: ("t", 0) in courier.outbound._gone)  # and it is told that nobody will come
    producer.prefill("q", "t", [9])
    producer.wait_sent("q")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("started", [False, True])
def test_consumer_aborts_while_registered(pair: Pair, mode: Mode, started: bool) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [1, 2], mode=mode)
    registered(producer)
    if started:
        producer.start("q", "t", 32)
        producer.progress("q", 16, [8])
    cancel(consumer)

    assert consumer.wait_received("r")["r"].startswith("aborted")
    all_quiet(producer, consumer)


def test_consumer_abort_waits_for_the_write_in_flight(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [1])
    producer.prefill("q", "t", [9])
    producer.until(lambda courier: len(courier._flights) == 1)
    cancel(consumer)
    producer.until(lambda courier: _states(courier) == ["DRAINING"])

    assert consumer.collect().received == producer.collect().sent == set()
    world.network.release_held()
    assert consumer.wait_received("r")["r"].startswith("aborted")
    producer.wait_sent("q")


def test_consumer_abort_waits_for_its_own_read_in_flight(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [1], mode=Mode.PULL)
    producer.prefill("q", "t", [9])
    consumer.until(lambda courier: len(courier._flights) == 1)
    cancel(consumer)
    producer.wait_sent("q")

    assert consumer.collect().received == set()
    world.network.release_held()
    assert consumer.wait_received("r")["r"].startswith("aborted")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_producer_abort_fails_the_consumer(pair: Pair, mode: Mode, held: bool, started: bool) -> None:
    producer, consumer = pair
    consumer.receive("r", "t", producer.address, [1, 2], mode=mode)
    registered(producer)
    if started:
        producer.start("q", "t", 32)
        producer.progress("q", 16, [8])
    abort(producer, held=held)

    assert consumer.wait_received("r")["r"].startswith("prefill_aborted")
    all_quiet(producer, consumer)
    assert producer.collect().sent == ({"q"} if held else set())


@pytest.mark.parametrize("mode", MODES)
def test_registration_after_the_producer_aborted_fails_at_once(pair: Pair, mode: Mode) -> None:
    producer, consumer = pair
    abort(producer, held=False)
    producer.ask(lambda _: None)
    consumer.receive("r", "t", producer.address, [1], mode=mode)

    assert consumer.wait_received("r")["r"].startswith("prefill_aborted")


def test_producer_abort_holds_blocks_until_the_write_has_ended(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [1, 2])
    producer.start("q", "t", 32)
    producer.progress("q", 16, [8])
    producer.until(lambda courier: len(courier._flights) == 1)
    abort(producer, held=True)
    producer.ask(lambda _: None)

    assert producer.collect().sent == consumer.collect().received == set()
    world.network.release_held()
    producer.wait_sent("q")
    assert consumer.wait_received("r")["r"].startswith("prefill_aborted")


# --- preemption -------------------------------------------------------------------------------------------------------


def test_wait_quiet_returns_only_when_no_write_reads_the_blocks(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [1, 2])
    producer.start("q", "t", 32)
    producer.progress("q", 16, [8])
    producer.until(lambda courier: len(courier._flights) == 1)
    producer.courier.submit([c.PrefillPreempted(RequestId("q"))])

    assert not producer.courier.wait_quiet([RequestId("q")], 0.05)
    world.network.release_held()
    assert producer.courier.wait_quiet([RequestId("q")], 5)

    # computed again elsewhere, the rest still arrives
    producer.progress("q", 32, [20, 21], ended=True)
    producer.finish("q")
    sent = producer.block(0, 8)
    assert consumer.wait_received("r") == {}
    assert consumer.blocks([1, 2]) == [sent, producer.block(0, 21)]


def test_preemption_of_offered_blocks_fails_the_pull(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Hold())
    consumer.receive("r", "t", producer.address, [1], mode=Mode.PULL)
    producer.start("q", "t", 16)
    producer.progress("q", 16, [8], ended=True)
    consumer.until(lambda courier: len(courier._flights) == 1)
    producer.courier.submit([c.PrefillPreempted(RequestId("q"))])

    assert producer.courier.wait_quiet([RequestId("q")], 5)
    producer.until(lambda courier: courier.outbound.num_legs == 0)
    world.network.release_held()
    assert consumer.wait_received("r")["r"].startswith("preempted")


# --- transports that misbehave within their contract ------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [Fail(), Fail(after_bytes=100), Refuse()])
def test_transfer_that_fails_fails_the_handoff_on_both_sides(
    world: World, pair: Pair, mode: Mode, fault: Fail | Refuse
) -> None:
    producer, consumer = pair
    world.network.inject(fault)
    consumer.receive("r", "t", producer.address, [1], mode=mode)
    producer.prefill("q", "t", [9])

    assert consumer.wait_received("r")["r"].startswith("transfer_failed")
    all_quiet(producer, consumer)


def test_failed_transfer_leaves_the_prefill_for_a_retarget(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(Fail())
    consumer.receive("r1", "t", producer.address, [1], epoch=1)
    producer.prefill("q", "t", [9])
    assert consumer.wait_received("r1")["r1"].startswith("transfer_failed")
    consumer.receive("r2", "t", producer.address, [1], epoch=2)

    assert consumer.wait_received("r2") == {}
    producer.wait_sent("q")


def test_notifications_out_of_order_and_repeated_commit_once(world: World, pair: Pair) -> None:
    producer, consumer = pair
    world.network.inject(LateNotification())
    world.network.inject(RepeatNotification(3), times=3)
    consumer.receive("r", "t", producer.address, [1, 2, 3])
    producer.start("q", "t", 48)
    producer.progress("q", 16, [7])
    consumer.until(lambda _: any(consumer.block(0, 1)))
    producer.progress("q", 48, [8, 9], first=1, ended=True)
    producer.finish("q")

    assert consumer.wait_received("r") == {}
    producer.wait_sent("q")
    assert consumer.blocks([1, 2, 3]) == producer.blocks([7, 8, 9])


def _states(courier: object) -> list[str]:
    return [leg.producer.state.name for job in courier.outbound._jobs.values() for leg in job.legs]  # type: ignore[attr-defined]
