"""Translate: between wire structs and the core's own types, one function each way."""

from collections.abc import Mapping, Sequence

from kvbaton.base.errors import IncompatiblePeer, RemoteProtocolError
from kvbaton.base.ids import HandoffKey, TransferId
from kvbaton.kv.blocks import GroupBlocks, decode_ids, encode_ids
from kvbaton.kv.layout import Group, GroupKind, Layout, MemoryKind, Region
from kvbaton.wire.messages import Key, WireBlocks, WireGroup, WireLayout, WireRegion


def key_to_wire(key: HandoffKey) -> Key:
    """Core -> wire."""
    return Key(key.transfer_id, key.epoch, key.child)


def key_from_wire(key: Key) -> HandoffKey:
    """Wire -> core."""
    return HandoffKey(TransferId(key.transfer_id), key.epoch, key.child)


def blocks_to_wire(groups: Sequence[GroupBlocks]) -> list[WireBlocks]:
    """Core -> wire."""
    return [WireBlocks(group.first, encode_ids(group)) for group in groups]


def blocks_from_wire(groups: Sequence[WireBlocks]) -> tuple[GroupBlocks, ...]:
    """Wire -> core. Raises RemoteProtocolError."""
    return tuple(decode_ids(group.first, group.ids) for group in groups)


def layout_to_wire(layout: Layout) -> WireLayout:
    """Core -> wire."""
    return WireLayout(
        memory=layout.memory.value,
        groups=[WireGroup(group.kind.value, group.block_tokens) for group in layout.groups],
        regions=[
            WireRegion(r.base, r.length_bytes, r.block_bytes, r.stride_bytes, r.group, r.device)
            for r in layout.regions
        ],
        num_blocks=layout.num_blocks,
    )


def layout_from_wire(layout: WireLayout) -> Layout:
    """Wire -> core.

    Raises:
        RemoteProtocolError: a region lies about its own extent, or refers to a group that is not there.
    """
    try:
        groups = tuple(Group(GroupKind(group.kind), group.block_tokens) for group in layout.groups)
        memory = MemoryKind(layout.memory)
    except ValueError as error:
        raise RemoteProtocolError(f"a layout names something unknown here: {error}") from error
    if any(group.block_tokens < 1 for group in groups):
        raise RemoteProtocolError("a layout's blocks hold no tokens")
    for region in layout.regions:
        if region.block_bytes < 1:
            raise RemoteProtocolError("a layout's region has blocks of no bytes")
        if region.group >= len(groups) or region.block_bytes > region.stride_bytes:
            raise RemoteProtocolError("a layout's region is inconsistent")
        if layout.num_blocks and (
            (layout.num_blocks - 1) * region.stride_bytes + region.block_bytes > region.length_bytes
        ):
            raise RemoteProtocolError("a layout's region is shorter than its blocks")
    regions = tuple(
        Region(r.base, r.length_bytes, r.block_bytes, r.stride_bytes, r.group, r.device)
        for r in layout.regions
    )
    return Layout(memory, groups, regions, layout.num_blocks)


def require_same_fingerprint(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Refuse a peer that differs in anything KV depends on.

    Raises:
        IncompatiblePeer: names the first field in alphabetical order that differs or is missing on one side.
    """
    for field in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(field, "(absent)"), theirs.get(field, "(absent)")
        if mine != other:
            raise IncompatiblePeer(field, mine, other)
