"""A prefill, its lease and its consumers in a world where everything that can go wrong does."""

import re
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from handoff_world import Setup, World
from kvbaton.base.errors import FailureReason
from kvbaton.protocol import effects
from kvbaton.protocol.mode import Mode
from strategies import examples

EPOCHS = ((0,), (0, 0), (0, 1), (0, 0, 1, 1))

setups = st.builds(
    lambda mode, verify, stream, in_flight, tokens, epochs, shares, hardware, seed: Setup(
        mode, verify, stream, in_flight, tokens, epochs, tuple(shares[: len(epochs)]), hardware, seed
    ),
    st.sampled_from(Mode),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 48),
    st.sampled_from(EPOCHS),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 1 << 16),
)


class Handoffs(RuleBasedStateMachine):
    """Hypothesis picks what happens next; the world asserts."""

    @initialize(setup=setups)
    def begin(self, setup: Setup) -> None:
        self.world = World(setup)

    def _happen(self, pick: int, *, faults: bool) -> None:
        found = self.world.operations(faults=faults)
        if found:
            self.world.do(found[pick % len(found)])

    @rule(pick=st.integers(0, 999))
    def something_ordinary(self, pick: int) -> None:
        self._happen(pick, faults=False)

    @rule(picks=st.lists(st.integers(0, 999), min_size=4, max_size=10))
    def a_while_of_ordinary_things(self, picks: list[int]) -> None:
        for pick in picks:
            self._happen(pick, faults=False)

    @rule(pick=st.integers(0, 999))
    def something_bad(self, pick: int) -> None:
        self._happen(pick, faults=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0, 31.0]))
    def time(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle(start=self.world.setup.seed % 2 == 0)


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = examples(120, steps=25)


def random_setup(random: Random) -> Setup:
    epochs = random.choice(EPOCHS)
    return Setup(
        mode=random.choice(list(Mode)),
        verify=random.random() < 0.4,
        stream=random.random() < 0.8,
        max_in_flight=random.randint(1, 3),
        num_tokens=random.randint(1, 48),
        epochs=epochs,
        first_shares=tuple(random.choice((0, 0, 1, 2, 4)) for _ in epochs),
        hardware=random.random() < 0.5,
        seed=random.randrange(1 << 30),
    )


def live(seed: int) -> World:
    """One whole life of a world: ordinary things and faults in a random ratio, then rest."""
    random = Random(seed)
    world = World(random_setup(random))
    fault_rate = random.choice((0.0, 0.02, 0.1, 0.3))
    share = random.choice(
        (0.1, 0.3, 1.0)
    )  # of the kinds of fault: few kinds, often, find what all of them together hide

    def wanted(name: str) -> bool:
        return Random(f"{seed} {re.sub('[0-9]', '', name)}").random() < share

    try:
        for _ in range(random.randint(5, 120)):
            if random.random() < 0.05:
                world.advance(random.choice((0.1, 1.0, 9.0, 31.0)))
            found = world.operations(faults=False)
            if random.random() < fault_rate:
                ordinary = {name for name, _ in found}
                bad = [
                    each
                    for each in world.operations(faults=True)
                    if each[0] not in ordinary and wanted(each[0])
                ]
                found = bad or found
            if found:
                world.do(random.choice(found))
        world.settle(start=random.random() < 0.8)
    except Exception as error:
        story = "\n  ".join([repr(world.setup), *world.log[-80:]])
        raise AssertionError(f"seed {seed}: {error!r}\n  {story}") from error
    return world


def test_many_lives_end_as_they_must() -> None:
    worlds = [live(seed) for seed in range(400)]
    committed = sum(isinstance(pair.outcome, effects.Commit) for world in worlds for pair in world.pairs)
    failed = sum(isinstance(pair.outcome, effects.Fail) for world in worlds for pair in world.pairs)

    assert committed > 100
    assert failed > 100


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_very_many_lives_end_as_they_must() -> None:
    for seed in range(1_000, 21_000):
        live(seed)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("epochs", [(0,), (0, 0)])
def test_without_faults_every_consumer_commits_and_the_prefill_is_freed(
    mode: Mode, verify: bool, epochs: tuple[int, ...]
) -> None:
    for seed in range(20):
        world = World(Setup(mode, verify, epochs=epochs, first_shares=(seed % 5,) * len(epochs), seed=seed))
        world.settle(start=True)

        assert [type(pair.outcome) for pair in world.pairs] == [effects.Commit] * len(epochs)
        assert world.frees == [effects.Free(report=True, reason=None)]


OPENING = ("0: arrives", "0: connects", "producer reads register")


def test_a_pull_whose_blocks_are_preempted_while_it_reads_fails() -> None:
    world = World(Setup(Mode.PULL))
    world.happens(*OPENING, "prefill starts", "prefill computes the rest", "0: reads OfferArrived")
    world.happens("prefill is preempted", "preempted blocks are overwritten", "READ 0 of 0 moves")
    world.settle(start=True)

    assert world.pairs[0].outcome == effects.Fail(
        FailureReason.PREEMPTED, "the offered blocks were taken back"
    )


def test_a_frozen_producers_write_keeps_an_aborted_consumers_blocks_until_it_thaws() -> None:
    world = World(Setup(Mode.PUSH))
    world.happens(*OPENING, "prefill starts", "prefill computes the rest", "WRITE 0 of 0 moves", "0: aborts")
    world.happens("producer freezes", "0: peer is silent")
    world.run_on()

    assert world.pairs[0].outcome is None
    world.settle(start=True)
    assert world.pairs[0].outcome == effects.Fail(FailureReason.ABORTED, "")


def test_a_register_read_after_its_cancel_was_answered_opens_no_leg() -> None:
    """The old connection's last bytes may be read after the new connection's first."""
    world = World(Setup(Mode.PUSH))
    world.happens("prefill starts", "0: arrives", "0: connects", "0: aborts")
    pair = world.pairs[0]
    pair.connection.broken = True
    world.happens("0: connection ended", "0: connects")
    old, new = pair.connections
    new_cancel = pair.connection.to_producer.popleft()
    world._hear(pair, new, new_cancel)
    world.happens("0: reads CancelledArrived")

    assert isinstance(pair.outcome, effects.Fail)
    world._hear(pair, old, ("register",))
    assert pair.leg is None
    world.settle(start=True)
