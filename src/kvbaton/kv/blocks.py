"""Block lists: which block ids hold which part of one request, per cache group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.kv.layout import Group, GroupKind

MAX_BLOCKS_PER_GROUP = 1 << 22


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Consecutive blocks of one request in one cache group.

    Attributes:
        first: index, within the request, of the first block listed.
        ids: block ids, shape (num_blocks,), int64; entry i holds block index `first + i`.
    """

    first: int
    ids: npt.NDArray[np.int64]

    @property
    def end(self) -> int:
        """Index after the last block listed."""
        return self.first + int(self.ids.shape[0])

    def between(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Ids of block indices start..end-1, all of which must be listed."""
        if start < self.first or end > self.end or start > end:
            raise RemoteProtocolError(f"blocks {start}..{end} asked for, {self.first}..{self.end} are known")
        return self.ids[start - self.first : end - self.first]


def group_blocks(first: int, ids: Sequence[int]) -> GroupBlocks:
    """Build a list from plain integers."""
    return GroupBlocks(first, np.asarray(ids, np.int64))


def encode_ids(blocks: GroupBlocks) -> bytes:
    """Block ids as little-endian int32, four bytes each."""
    return blocks.ids.astype("<i4").tobytes()


def decode_ids(first: int, data: bytes) -> GroupBlocks:
    """Read what `encode_ids` wrote.

    Raises:
        RemoteProtocolError: odd length, too many, or negative numbers.
    """
    if len(data) % 4 or len(data) // 4 > MAX_BLOCKS_PER_GROUP or first < 0:
        raise RemoteProtocolError(f"a block list of {len(data)} bytes starting at {first} is not acceptable")
    ids = np.frombuffer(data, "<i4").astype(np.int64)
    if ids.size and int(ids.min()) < 0:
        raise RemoteProtocolError("a block id is negative")
    return GroupBlocks(first, ids)


def num_final_blocks(group: Group, final_tokens: int, *, ended: bool) -> int | None:
    """How many leading blocks of a request can no longer change.

    Args:
        group: the cache group.
        final_tokens: tokens whose KV has been computed.
        ended: whether the prefill has computed its last token.
    Returns:
        A count, or None for "every block the request has".
    """
    if ended:
        return None
    if group.kind is GroupKind.STATE:
        return 0
    return final_tokens // group.block_tokens
