"""What the courier hears of a step's layers, and what is left for its end."""

from collections.abc import Sequence

import pytest

from kvbaton.base.ids import RequestId
from kvbaton.connector.tail import LayerTail
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.runtime.commands import Command, PrefillProgress, PrefillTail

REQUEST = RequestId("r")
BLOCK_BYTES = 1000


def told(commands: Sequence[Command]) -> list[tuple[str, int, list[tuple[int, list[int]]]]]:
    return [
        (c.request_id, c.num_regions, [(g.first, g.ids.tolist()) for g in c.groups])
        for c in commands
        if isinstance(c, PrefillTail)
    ]


class World:
    def __init__(self, regions: dict[str, int], *, pays: bool = True) -> None:
        self.heard: list[Command] = []
        self.asked: list[int] = []

        def decide(num_bytes: int) -> bool:
            self.asked.append(num_bytes)
            return pays

        self.tail = LayerTail(regions, decide, [BLOCK_BYTES], self.heard.extend)


def last_step(*groups: GroupBlocks) -> PrefillProgress:
    return PrefillProgress(REQUEST, 40, True, groups or (group_blocks(2, [7, 9]),))


def test_tail_of_the_last_step_names_blocks_first_and_counts_layers_as_they_come() -> None:
    world = World({"a": 0, "b": 1, "c": 2})

    before, after = world.tail.begin([last_step()])
    for layer in "abc":
        world.tail.layer_saved(layer)

    assert told(before) == [("r", 0, [(2, [7, 9])])]
    assert [(g.first, g.ids.tolist()) for g in after[0].groups] == [(4, [])]
    assert told(world.heard) == [("r", 1, []), ("r", 2, []), ("r", 3, [])]


def test_tail_counts_leading_regions_only_and_waits_for_all_layers_of_a_region() -> None:
    world = World({"a": 0, "b": 1, "c": 0, "d": 2})
    world.tail.begin([last_step()])

    world.tail.layer_saved("b")
    world.tail.layer_saved("a")
    assert world.heard == []
    world.tail.layer_saved("c")

    assert told(world.heard) == [("r", 2, [])]


def test_tail_of_a_step_that_ends_no_prompt_is_silent() -> None:
    world = World({"a": 0})
    frontier = PrefillProgress(REQUEST, 16, False, (group_blocks(0, [1]),))

    assert world.tail.begin([frontier]) == ([], (frontier,))
    world.tail.layer_saved("a")

    assert world.heard == []


def test_tail_that_does_not_pay_leaves_the_frontier_alone() -> None:
    world = World({"a": 0}, pays=False)
    frontier = last_step()

    assert world.tail.begin([frontier]) == ([], (frontier,))
    assert world.asked == [2 * BLOCK_BYTES]


@pytest.mark.parametrize("layer", ["never heard of", "a"])
def test_layers_after_the_end_or_unknown_are_nobodys_business(layer: str) -> None:
    world = World({"a": 0})
    world.tail.begin([last_step()])
    if layer == "a":
        world.tail.end()

    world.tail.layer_saved(layer)

    assert world.heard == []
