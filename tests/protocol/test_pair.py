"""A prefill, its lease and its consumers in a world where everything that can go wrong does."""

from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from handoff_world import Setup, World
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
    try:
        for _ in range(random.randint(5, 120)):
            if random.random() < 0.05:
                world.advance(random.choice((0.1, 1.0, 9.0, 31.0)))
            found = world.operations(faults=random.random() < fault_rate)
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
