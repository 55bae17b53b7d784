"""Layout: the regions of one rank's KV cache and how block ids map to byte ranges."""

from dataclasses import dataclass
from enum import StrEnum

from kvbaton.base.errors import IncompatiblePeer


class MemoryKind(StrEnum):
    """Where a region lives, in the words NIXL uses."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class GroupKind(StrEnum):
    """What a KV cache group stores, which decides when its blocks are final."""

    ATTENTION = "attention"  # a block is final once all its tokens are computed
    STATE = "state"  # recurrent state: final only when the prefill has ended


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group: layers that share block tables.

    Attributes:
        kind: when blocks become final.
        block_tokens: tokens per block.
    """

    kind: GroupKind
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous address range that holds the KV blocks of one or more layers.

    Attributes:
        base: address of block 0.
        length_bytes: registered length from `base`.
        block_bytes: bytes of one block that carry KV.
        stride_bytes: distance between consecutive block ids; at least `block_bytes`.
        group: index into `Layout.groups`.
        device: device index; 0 for host memory.
    """

    base: int
    length_bytes: int
    block_bytes: int
    stride_bytes: int
    group: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """All regions of one rank, in the model's layer order.

    Attributes:
        memory: kind of memory of every region.
        groups: the KV cache groups.
        regions: ordered alike on every rank of compatible engines.
        num_blocks: block ids run from 0 to num_blocks - 1.
    """

    memory: MemoryKind
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    num_blocks: int

    def group_block_bytes(self, group: int) -> int:
        """Bytes of one block of a group over all its regions."""
        return sum(region.block_bytes for region in self.regions if region.group == group)

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token adds, over all regions; groups of state do not grow."""
        return sum(
            region.block_bytes / self.groups[region.group].block_tokens
            for region in self.regions
            if self.groups[region.group].kind is GroupKind.ATTENTION
        )


def require_same_shape(ours: Layout, theirs: Layout) -> None:
    """Refuse a peer whose blocks do not map one to one onto ours.

    Base addresses, strides, devices and the number of blocks may differ; everything that gives bytes a meaning may not.

    Raises:
        IncompatiblePeer: names the first field that differs, with both values.
    """
    checks = (
        ("KV cache groups", _words(ours.groups), _words(theirs.groups)),
        ("number of KV regions", str(len(ours.regions)), str(len(theirs.regions))),
    )
    for field, mine, other in checks:
        if mine != other:
            raise IncompatiblePeer(field, mine, other)
    for index, (mine_r, other_r) in enumerate(zip(ours.regions, theirs.regions, strict=True)):
        if mine_r.group != other_r.group:
            raise IncompatiblePeer(f"KV cache group of region {index}", str(mine_r.group), str(other_r.group))
        if mine_r.block_bytes != other_r.block_bytes:
            raise IncompatiblePeer(
                f"bytes per block of region {index}", str(mine_r.block_bytes), str(other_r.block_bytes)
            )


def _words(groups: tuple[Group, ...]) -> str:
    return ", ".join(f"{group.kind} x {group.block_tokens} tokens" for group in groups)
