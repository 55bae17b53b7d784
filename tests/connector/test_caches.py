import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvbaton.base.errors import ConfigError
from kvbaton.connector.caches import describe_caches
from kvbaton.connector.checksum import block_checksum
from kvbaton.connector.groups import transfer_groups
from kvbaton.kv.layout import GroupKind, MemoryKind

HEADS, TOKENS, CONTENT, NUM_BLOCKS = 2, 4, 8, 5
PAGE_BYTES = HEADS * TOKENS * CONTENT * 4


class AttentionSpec:
    block_size = TOKENS
    page_size_bytes = PAGE_BYTES


class FullAttentionSpec(AttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    sliding_window = 16


class MambaSpec:
    block_size = 4096
    page_size_bytes = PAGE_BYTES
    mamba_cache_mode = "none"
    num_speculative_blocks = 1


class StrangeSpec:
    block_size = TOKENS


def config(*groups):
    return SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec(), layer_names=list(names)) for spec, names in groups
        ],
    )


def tensor() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, HEADS, TOKENS, CONTENT)


def describe(caches, *groups):
    about = config(*groups)
    return describe_caches(caches, about, transfer_groups(about)).layout


def test_layout_of_plain_layers_has_a_region_each_in_layer_order():
    caches = {"model.10.attn": tensor(), "model.2.attn": tensor()}

    layout = describe(caches, (FullAttentionSpec, caches))

    assert layout.memory is MemoryKind.DRAM
    assert [region.base for region in layout.regions] == [
        caches["model.2.attn"].data_ptr(),
        caches["model.10.attn"].data_ptr(),
    ]
    assert {(r.block_bytes, r.stride_bytes, r.length_bytes) for r in layout.regions} == {
        (PAGE_BYTES, PAGE_BYTES, PAGE_BYTES * NUM_BLOCKS)
    }


def test_layout_of_layers_packed_block_by_block_has_the_row_as_stride():
    packed = torch.zeros(NUM_BLOCKS, 2, HEADS, TOKENS, CONTENT)
    caches = {"0.attn": packed[:, 0], "1.attn": packed[:, 1]}

    layout = describe(caches, (FullAttentionSpec, caches))

    assert [region.base - packed.data_ptr() for region in layout.regions] == [0, PAGE_BYTES]
    assert {(r.block_bytes, r.stride_bytes) for r in layout.regions} == {(PAGE_BYTES, 2 * PAGE_BYTES)}


def test_layout_of_blocks_split_for_the_kernel_is_in_the_schedulers_blocks():
    caches = {"0.attn": torch.zeros(NUM_BLOCKS * 2, HEADS, TOKENS // 2, CONTENT)}

    (region,) = describe(caches, (FullAttentionSpec, caches)).regions

    assert (region.block_bytes, region.stride_bytes) == (PAGE_BYTES, PAGE_BYTES)


def test_layout_of_groups_that_share_memory_has_a_region_per_group():
    shared = tensor()
    caches = {"0.attn": shared, "1.attn": shared}

    layout = describe(caches, (FullAttentionSpec, ["0.attn"]), (SlidingWindowSpec, ["1.attn"]))

    assert [(region.base, region.group) for region in layout.regions] == [
        (shared.data_ptr(), 0),
        (shared.data_ptr(), 1),
    ]


def test_layout_of_layers_that_share_a_cache_within_a_group_has_one_region():
    shared = tensor()
    caches = {"0.attn": shared, "1.attn": shared}

    assert len(describe(caches, (FullAttentionSpec, caches)).regions) == 1


def test_layout_of_recurrent_state_moves_whole_pages():
    storage = torch.zeros(NUM_BLOCKS, PAGE_BYTES // 4)
    caches = {"0.mamba": [storage[:, :10], storage[:, 10:40]]}

    layout = describe(caches, (MambaSpec, caches))

    assert layout.groups[0].kind is GroupKind.STATE
    assert (layout.regions[0].block_bytes, layout.regions[0].stride_bytes) == (PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, NUM_BLOCKS, HEADS, TOKENS, CONTENT // 2),
        torch.zeros(HEADS, NUM_BLOCKS, TOKENS, CONTENT).transpose(0, 1),
        torch.zeros(NUM_BLOCKS, HEADS, TOKENS, CONTENT * 2)[..., :CONTENT],
        torch.zeros(NUM_BLOCKS, HEADS, TOKENS * 2, CONTENT),
    ],
)
def test_layout_whose_blocks_are_not_contiguous_pages_is_refused(cache: torch.Tensor):
    with pytest.raises(ConfigError):
        describe({"0.attn": cache}, (FullAttentionSpec, ["0.attn"]))


def test_layout_with_a_missing_layer_is_refused_and_names_it():
    with pytest.raises(ConfigError) as caught:
        describe({"0.attn": tensor()}, (FullAttentionSpec, ["0.attn", "1.attn"]))

    assert caught.value.value == "1.attn"


def test_groups_of_an_unknown_kind_are_refused():
    with pytest.raises(ConfigError):
        transfer_groups(config((StrangeSpec, ["0"])))


def test_groups_with_states_at_block_boundaries_are_refused():
    class Aligned(MambaSpec):
        mamba_cache_mode = "align"

    with pytest.raises(ConfigError) as caught:
        transfer_groups(config((Aligned, ["0"])))

    assert caught.value.key == "mamba_cache_mode"


def test_checksum_is_block_major_over_the_groups_regions():
    packed = torch.arange(NUM_BLOCKS * 2 * HEADS * TOKENS * CONTENT, dtype=torch.float32)
    packed = packed.reshape(NUM_BLOCKS, 2, HEADS, TOKENS, CONTENT)
    caches = {"0.attn": packed[:, 0], "1.attn": packed[:, 1]}
    layout = describe(caches, (FullAttentionSpec, caches))

    found = block_checksum(layout, [packed.untyped_storage()])(0, np.asarray([3, 1]))

    expected = [zlib.crc32(packed[block, layer].numpy().tobytes()) for block in (3, 1) for layer in (0, 1)]
    assert np.frombuffer(found, "<u4").tolist() == expected


def test_checksum_sees_later_changes_and_ignores_other_groups():
    one, two = tensor(), tensor()
    layout = describe({"0": one, "1": two}, (FullAttentionSpec, ["0"]), (SlidingWindowSpec, ["1"]))
    checksum = block_checksum(layout, [one.untyped_storage(), two.untyped_storage()])
    before = checksum(0, np.asarray([2]))
    two[2] = 7

    assert checksum(0, np.asarray([2])) == before
    one[2, 0, 0, 0] = 7
    assert checksum(0, np.asarray([2])) != before
