"""What the courier hears of a step's layers, and what is left for its end."""

from collections.abc import Sequence

import pytest

from kvbaton.base.ids import RequestId
from kvbaton.connector.tail import LayerTail
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.runtime.commands import Command, PrefillProgress, PrefillTail

REQUEST = RequestId("r")
BLOCK_BYTES = 1000


def told(commands: Sequence[Command]) -> list[tuple[str, int, int, list[tuple[int, list[int]]]]]:
    return [
        (c.request_id, c.num_regions, c.final_tokens, [(g.first, g.ids.tolist()) for g in c.groups])
        for c in commands
        if isinstance(c, PrefillTail)
    ]


class World:
    def __init__(self, regions: dict[str, int], *, parts: int = 9) -> None:
        self.heard: list[Command] = []
        self.asked: list[tuple[int, int]] = []

        def decide(num_bytes: int, tokens_left: int) -> int:
            self.asked.append((num_bytes, tokens_left))
            return parts

        self.tail = LayerTail(regions, decide, [BLOCK_BYTES], self.heard.extend)


def last_step(*groups: GroupBlocks) -> PrefillProgress:
    return PrefillProgress(REQUEST, 40, True, groups or (group_blocks(2, [7, 9]),))


def test_tail_of_the_last_step_names_blocks_first_and_counts_layers_as_they_come() -> None:
    world = World({"a": 0, "b": 1, "c": 2})

    world.tail.begin([last_step()])
    for layer in "abc":
        world.tail.layer_saved(layer)
    (after,) = world.tail.end([last_step()])

    assert told(world.heard) == [("r", 1, 40, [(2, [7, 9])]), ("r", 2, 40, []), ("r", 3, 40, [])]
    assert (after.final_tokens, after.ended) == (40, True)
    assert [(g.first, g.ids.tolist()) for g in after.groups] == [(4, [])]


def test_tail_counts_leading_regions_only_and_waits_for_all_layers_of_a_region() -> None:
    world = World({"a": 0, "b": 1, "c": 0, "d": 2})
    world.tail.begin([last_step()])

    world.tail.layer_saved("b")
    world.tail.layer_saved("a")
    assert world.heard == []
    world.tail.layer_saved("c")

    assert told(world.heard) == [("r", 2, 40, [(2, [7, 9])])]


def test_tail_of_a_step_amid_a_prompt_says_how_far_that_step_goes() -> None:
    world = World({"a": 0, "b": 1})
    step = PrefillProgress(REQUEST, 16, False, (group_blocks(0, [1]),), tokens_left=24)
    world.tail.begin([step])
    world.tail.layer_saved("a")
    (after,) = world.tail.end([step])

    assert world.asked == [(BLOCK_BYTES, 24)]
    assert told(world.heard) == [("r", 1, 16, [(0, [1])])]
    assert (after.final_tokens, after.ended) == (16, False)


def test_tail_that_does_not_pay_leaves_the_frontier_alone() -> None:
    world = World({"a": 0, "b": 1}, parts=1)
    frontier = last_step()
    world.tail.begin([frontier])
    world.tail.layer_saved("a")

    assert world.tail.end([frontier]) == (frontier,)
    assert world.heard == []
    assert world.asked == [(2 * BLOCK_BYTES, 0)]


def test_tail_without_any_layer_hook_leaves_the_blocks_to_the_frontier() -> None:
    world = World({"a": 0, "b": 1})
    frontier = last_step()
    world.tail.begin([frontier])

    assert world.tail.end([frontier]) == (frontier,)


@pytest.mark.parametrize("layer", ["never heard of", "a"])
def test_layers_after_the_end_or_unknown_are_nobodys_business(layer: str) -> None:
    world = World({"a": 0, "b": 1})
    world.tail.begin([last_step()])
    if layer == "a":
        world.tail.end([last_step()])

    world.tail.layer_saved(layer)

    assert world.heard == []


@pytest.mark.parametrize(
    ("num_regions", "parts", "ended", "cuts"),
    [
        (5, 2, False, [3, 5]),
        (8, 4, False, [2, 4, 6, 8]),
        # what leaves last is all that stays exposed, so it is small
        (8, 4, True, [2, 4, 6, 7, 8]),
        (8, 2, True, [4, 6, 8]),
        (5, 2, True, [3, 4, 5]),
        (8, 8, True, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_parts_are_ranges_of_regions_and_the_last_region_is_always_told(
    num_regions: int, parts: int, ended: bool, cuts: list[int]
) -> None:
    world = World({str(index): index for index in range(num_regions)}, parts=parts)
    world.tail.begin([PrefillProgress(REQUEST, 40, ended, (group_blocks(2, [7, 9]),))])
    for index in range(num_regions):
        world.tail.layer_saved(str(index))

    assert told(world.heard) == [("r", cut, 40, [(2, [7, 9])] if cut == cuts[0] else []) for cut in cuts]
