"""Translate: core values survive the wire, and a peer's numbers cannot overflow our arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.errors import IncompatiblePeer, RemoteProtocolError
from kvbaton.base.ids import HandoffKey, TransferId
from kvbaton.kv.blocks import group_blocks
from kvbaton.kv.layout import Group, GroupKind, Layout, MemoryKind, Region
from kvbaton.kv.plan import BlockPairs, plan_transfer
from kvbaton.wire import messages as m
from kvbaton.wire.translate import (
    blocks_from_wire,
    blocks_to_wire,
    key_from_wire,
    key_to_wire,
    layout_from_wire,
    layout_to_wire,
    require_same_fingerprint,
)
from strategies import counts, examples, transfer_ids
from wire.messages_strategies import layouts

small = st.integers(1, 64)


@st.composite
def valid_layouts(draw: st.DrawFn) -> Layout:
    num_blocks = draw(st.integers(0, 1 << 20))
    groups = tuple(
        draw(st.lists(st.builds(Group, st.sampled_from(GroupKind), small), min_size=1, max_size=3))
    )
    regions = []
    for _ in range(draw(st.integers(0, 4))):
        block, gap = draw(small), draw(st.integers(0, 64))
        regions.append(
            Region(
                base=draw(st.integers(0, 1 << 57)),
                length_bytes=num_blocks * (block + gap) + draw(st.integers(0, 9)),
                block_bytes=block,
                stride_bytes=block + gap,
                group=draw(st.integers(0, len(groups) - 1)),
                device=draw(st.integers(0, 7)),
            )
        )
    return Layout(draw(st.sampled_from(MemoryKind)), groups, tuple(regions), num_blocks)


@given(valid_layouts())
@examples(80)
def test_a_layout_survives_the_wire(layout: Layout) -> None:
    decoded = m.decode(m.encode(m.Welcome(identity_with(layout_to_wire(layout)))))

    assert isinstance(decoded, m.Welcome)
    assert layout_from_wire(decoded.identity.layout) == layout


def identity_with(layout: m.WireLayout) -> m.Identity:
    return m.Identity("e", 0, 0, 1, 1, 1, "a", b"", layout, {})


extremes = st.sampled_from([0, 1, 2, 63, 64, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 61), (1 << 62) - 1])
wild_layouts = st.builds(
    m.WireLayout,
    st.sampled_from(["DRAM", "VRAM", "dram"]),
    st.lists(
        st.builds(m.WireGroup, st.sampled_from(["attention", "state", "x"]), extremes), min_size=1, max_size=2
    ),
    st.lists(st.builds(m.WireRegion, *[extremes] * 6), max_size=2),
    extremes,
)


@given(wild_layouts | layouts, st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=3, unique=True))
@examples(200)
def test_a_layout_is_refused_or_safe_to_plan_with(wire: m.WireLayout, ids: list[int]) -> None:
    try:
        layout = layout_from_wire(wire)
    except RemoteProtocolError:
        return
    wanted = np.asarray([each % max(layout.num_blocks, 1) for each in ids[:1]], np.int64)
    pairs = [BlockPairs(index, wanted, wanted) for index in range(len(layout.groups))]
    try:
        plan = plan_transfer(layout, layout, pairs)
    except RemoteProtocolError:
        return

    ends = plan.remote + plan.length
    assert plan.length.min(initial=1) > 0
    assert ends.min(initial=1) > 0, "overflow"
    assert all(
        any(r.base <= int(start) and int(end) <= r.base + r.length_bytes for r in layout.regions)
        for start, end in zip(plan.remote, ends, strict=True)
    )


def one_region(**changed: int) -> m.WireLayout:
    fields = {
        "base": 4096,
        "length_bytes": 640,
        "block_bytes": 64,
        "stride_bytes": 64,
        "group": 0,
        "device": 0,
    } | changed
    return m.WireLayout("DRAM", [m.WireGroup("attention", 16)], [m.WireRegion(**fields)], 10)


@pytest.mark.parametrize(
    "layout",
    [
        one_region(length_bytes=639),
        one_region(block_bytes=65),
        one_region(block_bytes=0),
        one_region(group=1),
        one_region(stride_bytes=1 << 61),
        m.WireLayout("DISK", [m.WireGroup("attention", 16)], [], 1),
        m.WireLayout("DRAM", [m.WireGroup("mamba", 16)], [], 1),
        m.WireLayout("DRAM", [m.WireGroup("attention", 0)], [], 1),
    ],
)
def test_a_layout_that_lies_is_refused(layout: m.WireLayout) -> None:
    with pytest.raises(RemoteProtocolError):
        layout_from_wire(layout)


def test_an_address_beyond_what_arithmetic_can_hold_is_refused_by_the_decoder() -> None:
    identity = identity_with(one_region(base=(1 << 64) - 1))

    with pytest.raises(RemoteProtocolError):
        m.decode(m.encode(m.Welcome(identity)))


@given(transfer_ids, counts, counts)
@examples(100)
def test_a_key_survives_the_wire(transfer_id: str, epoch: int, child: int) -> None:
    key = HandoffKey(TransferId(transfer_id), epoch, child)

    assert key_from_wire(key_to_wire(key)) == key


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.lists(st.integers(0, (1 << 31) - 1), max_size=20)), max_size=4
    )
)
@examples(100)
def test_block_lists_survive_the_wire(lists: list[tuple[int, list[int]]]) -> None:
    read = blocks_from_wire(blocks_to_wire([group_blocks(first, ids) for first, ids in lists]))

    assert [(group.first, group.ids.tolist()) for group in read] == lists


def test_equal_fingerprints_pass() -> None:
    require_same_fingerprint({"model": "a", "dtype": "b"}, {"dtype": "b", "model": "a"})


@pytest.mark.parametrize(
    ("theirs", "field", "other"),
    [
        ({"model": "a", "dtype": "float32"}, "dtype", "float32"),
        ({"model": "a"}, "dtype", "(absent)"),
        ({"model": "a", "dtype": "b", "zz": "1"}, "zz", "1"),
        ({}, "dtype", "(absent)"),
    ],
)
def test_a_differing_fingerprint_names_the_field_and_both_values(
    theirs: dict[str, str], field: str, other: str
) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        require_same_fingerprint({"model": "a", "dtype": "b"}, theirs)

    assert (caught.value.field, caught.value.theirs) == (field, other)
