"""The planner against a naive twin that copies block by block."""

import itertools
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton.base.errors import IncompatiblePeer, RemoteProtocolError
from kvbaton.kv.layout import Group, GroupKind, Layout, MemoryKind, Region, require_same_shape
from kvbaton.kv.plan import BlockPairs, plan_transfer

# A loaded machine is no failure: what is checked here is bytes, not time.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Ids = npt.NDArray[np.int64]


def ids(*values: int) -> Ids:
    return np.array(values, np.int64)


def layout(
    block_bytes: list[int], groups: list[int], padding: list[int], num_blocks: int, base: int, device: int = 0
) -> Layout:
    regions = []
    for size, group, pad in zip(block_bytes, groups, padding, strict=True):
        stride = size + pad
        regions.append(Region(base, stride * num_blocks, size, stride, group, device))
        base += stride * num_blocks + 13
    kinds = tuple(Group(GroupKind.ATTENTION, 16) for _ in range(max(groups) + 1))
    return Layout(MemoryKind.DRAM, kinds, tuple(regions), num_blocks)


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[Layout, Layout, list[BlockPairs]]:
    num_regions = draw(st.integers(1, 4))
    num_groups = draw(st.integers(1, 3))
    block_bytes = draw(st.lists(st.integers(1, 8), min_size=num_regions, max_size=num_regions))
    groups = draw(st.lists(st.integers(0, num_groups - 1), min_size=num_regions, max_size=num_regions))
    paddings = st.lists(st.sampled_from([0, 0, 3]), min_size=num_regions, max_size=num_regions)
    local_blocks, remote_blocks = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    local = layout(block_bytes, groups, draw(paddings), local_blocks, 1000, device=1)
    remote = layout(block_bytes, groups, draw(paddings), remote_blocks, 9000, device=2)
    pairs = []
    for group in range(num_groups):
        count = draw(st.integers(0, min(local_blocks, remote_blocks)))
        ours = draw(st.permutations(range(local_blocks)))[:count]
        theirs = draw(st.permutations(range(remote_blocks)))[:count]
        pairs.append(BlockPairs(group, ids(*ours), ids(*theirs)))
    return local, remote, pairs


def naive_moves(local: Layout, remote: Layout, pairs: list[BlockPairs]) -> set[tuple[int, int]]:
    """Every (our address, their address) that must move, one byte at a time."""
    moves = set()
    for entry in pairs:
        for mine, other in zip(local.regions, remote.regions, strict=True):
            if mine.group != entry.group:
                continue
            for ours, theirs in zip(entry.local.tolist(), entry.remote.tolist(), strict=True):
                for byte in range(mine.block_bytes):
                    moves.add(
                        (
                            mine.base + ours * mine.stride_bytes + byte,
                            other.base + theirs * other.stride_bytes + byte,
                        )
                    )
    return moves


@patient
@given(handoffs())
def test_plan_moves_the_same_bytes_as_the_naive_twin(case: tuple[Layout, Layout, list[BlockPairs]]) -> None:
    local, remote, pairs = case
    plan = plan_transfer(local, remote, pairs)
    moves = [
        (ours + byte, theirs + byte)
        for ours, theirs, length in zip(
            plan.local.tolist(), plan.remote.tolist(), plan.length.tolist(), strict=True
        )
        for byte in range(length)
    ]

    assert len(moves) == len(set(moves)), "a byte moves twice"
    assert set(moves) == naive_moves(local, remote, pairs)


@patient
@given(handoffs())
def test_plan_counts_its_bytes(case: tuple[Layout, Layout, list[BlockPairs]]) -> None:
    local, remote, pairs = case
    plan = plan_transfer(local, remote, pairs)

    assert plan.num_bytes == sum(
        entry.local.shape[0] * local.group_block_bytes(entry.group) for entry in pairs
    )
    assert plan.local.shape == plan.remote.shape == plan.length.shape == (plan.num_ranges,)
    assert {array.dtype for array in (plan.local, plan.remote, plan.length)} == {np.dtype(np.int64)}


@patient
@given(handoffs())
def test_plan_leaves_no_mergeable_neighbours_and_no_range_leaves_its_region(
    case: tuple[Layout, Layout, list[BlockPairs]],
) -> None:
    local, remote, pairs = case
    plan = plan_transfer(local, remote, pairs)
    rows = list(zip(plan.local.tolist(), plan.remote.tolist(), plan.length.tolist(), strict=True))

    for start, _, length in rows:
        assert any(r.base <= start and start + length <= r.base + r.length_bytes for r in local.regions)
    for _, start, length in rows:
        assert any(r.base <= start and start + length <= r.base + r.length_bytes for r in remote.regions)
    for (a, b, length), (next_a, next_b, _) in itertools.pairwise(rows):
        assert (a + length, b + length) != (next_a, next_b)


@patient
@given(handoffs(), st.randoms())
def test_plan_does_not_depend_on_the_order_of_pairs(
    case: tuple[Layout, Layout, list[BlockPairs]], random: Random
) -> None:
    local, remote, pairs = case
    shuffled = []
    for entry in pairs:
        order = list(range(entry.local.shape[0]))
        random.shuffle(order)
        shuffled.append(BlockPairs(entry.group, entry.local[order], entry.remote[order]))
    plan, other = plan_transfer(local, remote, pairs), plan_transfer(local, remote, shuffled[::-1])

    np.testing.assert_array_equal(plan.local, other.local)
    np.testing.assert_array_equal(plan.remote, other.remote)
    np.testing.assert_array_equal(plan.length, other.length)


@patient
@given(handoffs())
def test_plan_seen_from_the_other_side_moves_the_same_bytes(
    case: tuple[Layout, Layout, list[BlockPairs]],
) -> None:
    local, remote, pairs = case
    plan = plan_transfer(local, remote, pairs)
    back = plan_transfer(remote, local, [BlockPairs(e.group, e.remote, e.local) for e in pairs])

    assert back.num_bytes == plan.num_bytes
    assert back.num_ranges == plan.num_ranges


def test_plan_of_descending_dense_blocks_is_one_range_per_region() -> None:
    dense = layout([4, 4], [0, 0], [0, 0], 8, 1000)
    plan = plan_transfer(dense, dense, [BlockPairs(0, ids(5, 4, 3), ids(2, 1, 0))])

    assert plan.local.tolist() == [1012, 1057]
    assert plan.remote.tolist() == [1000, 1045]
    assert plan.length.tolist() == [12, 12]


def test_plan_keeps_padded_blocks_apart() -> None:
    padded = layout([4], [0], [1], 8, 1000)
    plan = plan_transfer(padded, padded, [BlockPairs(0, ids(0, 1), ids(0, 1))])

    assert plan.num_ranges == 2


def test_plan_of_nothing_is_empty() -> None:
    dense = layout([4], [0], [0], 8, 1000)

    for pairs in ([], [BlockPairs(0, ids(), ids())]):
        plan = plan_transfer(dense, dense, pairs)

        assert (plan.num_ranges, plan.num_bytes) == (0, 0)


def test_plan_carries_both_devices() -> None:
    ours = layout([4], [0], [0], 8, 1000, device=3)
    theirs = layout([4], [0], [0], 8, 1000, device=5)
    plan = plan_transfer(ours, theirs, [BlockPairs(0, ids(0), ids(0))])

    assert (plan.local_device, plan.remote_device) == (3, 5)


@pytest.mark.parametrize(
    ("local", "remote"),
    [([8], [0]), ([0], [5]), ([-1], [0]), ([0], [-1]), ([0, 1], [0]), ([2**40], [0])],
)
def test_plan_of_impossible_blocks_is_refused(local: list[int], remote: list[int]) -> None:
    ours, theirs = layout([4], [0], [0], 8, 1000), layout([4], [0], [0], 5, 9000)

    with pytest.raises(RemoteProtocolError):
        plan_transfer(ours, theirs, [BlockPairs(0, ids(*local), ids(*remote))])


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (layout([4, 8], [0, 0], [0, 0], 8, 0), "bytes per block of region 1"),
        (layout([4], [0], [0], 8, 0), "number of KV regions"),
        (layout([4, 4], [0, 1], [0, 0], 8, 0), "KV cache groups"),
        (
            Layout(
                MemoryKind.DRAM,
                (Group(GroupKind.STATE, 16),),
                layout([4, 4], [0, 0], [0, 0], 8, 0).regions,
                8,
            ),
            "KV cache groups",
        ),
    ],
)
def test_layouts_that_differ_in_meaning_are_incompatible(theirs: Layout, field: str) -> None:
    ours = layout([4, 4], [0, 0], [0, 0], 8, 0)

    with pytest.raises(IncompatiblePeer) as caught:
        require_same_shape(ours, theirs)
    assert caught.value.field == field


def test_layouts_that_differ_in_place_only_are_compatible() -> None:
    require_same_shape(
        layout([4, 4], [0, 0], [0, 0], 8, 0), layout([4, 4], [0, 0], [3, 0], 99, 5000, device=2)
    )
