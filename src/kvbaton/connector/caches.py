"""Caches: where vLLM's KV cache tensors lie, as regions.

Addresses come from storage pointers, strides and page sizes. A tensor's shape says little: vLLM permutes dimensions, packs several
layers into one allocation, and splits a block where the attention kernel wants smaller ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.base.errors import ConfigError
from kvbaton.connector.groups import CacheGroup, spec_of
from kvbaton.kv.layout import GroupKind, Layout, MemoryKind, Region


@dataclass(frozen=True, slots=True)
class Caches:
    """What was found.

    Attributes:
        layout: the regions.
        region_by_layer: index into `layout.regions` of the region that holds a layer's KV.
    """

    layout: Layout
    region_by_layer: Mapping[str, int]


def describe_caches(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, groups: Sequence[CacheGroup]
) -> Caches:
    """Turn the tensors vLLM registers into a layout.

    Layers that share memory within a group become one region; regions are in the order of layer names, numbers compared as numbers,
    so that two engines agree on it.

    Raises:
        ConfigError: a tensor is missing, or its blocks are not contiguous.
    """
    layers = sorted(
        ((name, position) for position, group in enumerate(groups) for name in group.layers),
        key=lambda entry: (_natural(entry[0]), entry[1]),
    )
    num_blocks = int(kv_cache_config.num_blocks)
    regions: dict[tuple[int, int], Region] = {}
    key_by_layer: dict[str, tuple[int, int]] = {}
    memory: MemoryKind | None = None
    for name, position in layers:
        if name not in kv_caches:
            raise ConfigError("KV cache", name, "a tensor for every layer of every KV cache group")
        group = groups[position]
        spec = spec_of(kv_cache_config.kv_cache_groups[group.index], name)
        cache = kv_caches[name]
        first = cache[0] if isinstance(cache, list | tuple) else cache
        kind = MemoryKind.DRAM if first.device.type == "cpu" else MemoryKind.VRAM
        if memory not in (None, kind):
            raise ConfigError("KV cache", name, f"memory of one kind; the other layers are in {memory}")
        memory = kind
        region = _region(name, first, spec, group.kind, position, num_blocks)
        regions.setdefault((region.base, position), region)
        key_by_layer[name] = (region.base, position)
    if memory is None:
        raise ConfigError("model", "no KV cache", "at least one layer with a KV cache")
    index_by_key = {key: index for index, key in enumerate(regions)}
    return Caches(
        Layout(memory, tuple(group.geometry for group in groups), tuple(regions.values()), num_blocks),
        {name: index_by_key[key] for name, key in key_by_layer.items()},
    )


def _region(name: str, cache: Any, spec: Any, kind: GroupKind, position: int, num_blocks: int) -> Region:
    page_bytes = int(spec.page_size_bytes)
    if kind is GroupKind.STATE or cache.ndim == 1:
        # all of a block's states lie in its page, whatever views the layer has of them
        block_bytes = stride_bytes = page_bytes
    else:
        block_bytes, stride_bytes = _block_extent(name, cache, num_blocks)
        if block_bytes > page_bytes:
            raise ConfigError("KV cache", f"{name}: blocks of {block_bytes} bytes", f"at most {page_bytes}")
    device = 0 if cache.device.type == "cpu" else max(int(cache.get_device()), 0)
    length_bytes = (num_blocks - 1) * stride_bytes + block_bytes
    storage = cache.untyped_storage()
    if cache.data_ptr() + length_bytes > storage.data_ptr() + storage.nbytes():
        raise ConfigError(
            "KV cache", f"{name}: {storage.nbytes()} bytes", f"{num_blocks} blocks of {page_bytes}"
        )
    return Region(cache.data_ptr(), length_bytes, block_bytes, stride_bytes, position, device)


def _block_extent(name: str, cache: Any, num_blocks: int) -> tuple[int, int]:
    """Bytes of one of the scheduler's blocks, and from one to the next."""
    if cache.shape[0] % num_blocks:
        raise ConfigError(
            "KV cache", f"{name}: shape {tuple(cache.shape)}", f"a multiple of {num_blocks} blocks first"
        )
    split = cache.shape[0] // num_blocks
    item_bytes = int(cache.element_size())
    inner = list(zip(cache.shape[1:], cache.stride()[1:], strict=True))
    span_bytes = (sum((size - 1) * step for size, step in inner) + 1) * item_bytes
    dense_bytes = item_bytes
    for size, _ in inner:
        dense_bytes *= int(size)
    step_bytes = int(cache.stride(0)) * item_bytes
    if span_bytes != dense_bytes or step_bytes < span_bytes or (split > 1 and step_bytes != span_bytes):
        raise ConfigError(
            "kv_cache_layout",
            f"{name}: shape {tuple(cache.shape)}, strides {tuple(cache.stride())}",
            "a layout in which each block is contiguous (LBHNC, also called HND)",
        )
    return split * span_bytes, split * step_bytes


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))
