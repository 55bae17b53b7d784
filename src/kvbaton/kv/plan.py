"""Plan: the byte ranges that move block pairs from one layout to another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.kv.layout import Layout

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks of one group that correspond: `local[i]` holds the same tokens as `remote[i]`.

    Attributes:
        group: KV cache group index.
        local: our block ids, shape (num_pairs,), int64.
        remote: the peer's block ids, shape (num_pairs,), int64.
    """

    group: int
    local: Int64s
    remote: Int64s


@dataclass(frozen=True, slots=True)
class Plan:
    """Byte ranges that must move, region-major, block ids in the order given.

    Attributes:
        local: addresses on our side, shape (num_ranges,), int64.
        remote: addresses on the peer's side, shape (num_ranges,), int64.
        length: bytes of each range, shape (num_ranges,), int64.
        local_device: device index of every local range.
        remote_device: device index of every remote range.
    """

    local: Int64s
    remote: Int64s
    length: Int64s
    local_device: int = 0
    remote_device: int = 0

    @property
    def num_ranges(self) -> int:
        """Descriptors per side."""
        return int(self.length.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return int(self.length.sum())


def plan_transfer(
    local: Layout, remote: Layout, pairs: Sequence[BlockPairs], regions: slice = slice(None)
) -> Plan:
    """Map block pairs to the fewest byte ranges that move them.

    Pure geometry: nothing is posted, registered or locked. The layouts passed `require_same_shape`.

    Args:
        local: our layout.
        remote: the peer's layout.
        pairs: at most one entry per group; ids may be empty.
        regions: which regions; all by default.
    Returns:
        Ranges in region order; within a region sorted by local id, neighbours contiguous on both sides merged. (Engines
        often hand out ids in descending order, so sorting is what makes runs merge.)
    Raises:
        RemoteProtocolError: a block id is outside its pool, or the two columns differ in length.

    Invariant: total length == sum over groups of pairs * group_block_bytes.   Cost: O(pairs * regions) in numpy, one sort per group.
    """
    by_group = {entry.group: _sorted_within(entry, local.num_blocks, remote.num_blocks) for entry in pairs}
    columns: list[tuple[Int64s, Int64s, Int64s]] = []
    for ours, theirs in zip(local.regions[regions], remote.regions[regions], strict=True):
        entry = by_group.get(ours.group)
        if entry is None or not entry.local.shape[0]:
            continue
        columns.append(
            _coalesce(
                ours.base + entry.local * ours.stride_bytes,
                theirs.base + entry.remote * theirs.stride_bytes,
                ours.block_bytes,
            )
        )
    if not columns:
        empty = np.empty(0, np.int64)
        return Plan(empty, empty, empty)
    return Plan(
        local=np.concatenate([column[0] for column in columns]),
        remote=np.concatenate([column[1] for column in columns]),
        length=np.concatenate([column[2] for column in columns]),
        local_device=local.regions[0].device,
        remote_device=remote.regions[0].device,
    )


def _sorted_within(entry: BlockPairs, num_local: int, num_remote: int) -> BlockPairs:
    if entry.local.shape != entry.remote.shape:
        raise RemoteProtocolError(
            f"group {entry.group}: {entry.local.shape[0]} local blocks against {entry.remote.shape[0]} remote ones"
        )
    for side, ids, limit in (("local", entry.local, num_local), ("remote", entry.remote, num_remote)):
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            raise RemoteProtocolError(f"group {entry.group}: a {side} block id is outside 0..{limit - 1}")
    order = np.argsort(entry.local, kind="stable")
    return BlockPairs(entry.group, entry.local[order], entry.remote[order])


def _coalesce(local: Int64s, remote: Int64s, block_bytes: int) -> tuple[Int64s, Int64s, Int64s]:
    """Merge rows whose successor starts where they end, on both sides."""
    joined = (np.diff(local) == block_bytes) & (np.diff(remote) == block_bytes)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    counts = np.diff(np.concatenate((starts, [local.shape[0]])))
    return local[starts], remote[starts], counts.astype(np.int64) * block_bytes
