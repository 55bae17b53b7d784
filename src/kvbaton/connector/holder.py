"""Holder: blocks that must not be reused although vLLM has no request for them."""

from collections.abc import Sequence
from typing import Any

from kvbaton.base.ids import RequestId


class BlockHolder:
    """Keeps blocks out of vLLM's free pool while a transfer may touch them and no request owns them any more.

    A sliding-window group gives blocks back as soon as the window has moved past them, also while they are being sent; and a request
    that has failed gives back all of its blocks, also while a silent peer may still write into them.

    Owner: the scheduler's thread.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._pool: Any = None
        self._held: dict[RequestId, list[Any]] = {}

    def bind(self, pool: Any) -> None:
        """Use vLLM's block pool from now on."""
        self._pool = pool

    def hold(self, request_id: RequestId, ids: Sequence[int]) -> None:
        """Count one more user of these blocks."""
        if self._pool is None or not ids:
            return
        blocks = [self._pool.blocks[block_id] for block_id in ids]
        self._pool.touch(blocks)
        self._held.setdefault(request_id, []).extend(blocks)

    def release(self, request_id: RequestId) -> None:
        """Stop using a request's blocks; harmless if none are held."""
        blocks = self._held.pop(request_id, None)
        if blocks:
            self._pool.free_blocks(reversed(blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return sum(len(blocks) for blocks in self._held.values())
