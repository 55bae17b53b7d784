"""Quarantine: lets a request fail at once while a transfer may still write into its blocks.

vLLM frees the blocks of a failed request. A worker that must report a failure before its fence says so in the same step, the
scheduler's half then counts itself as one more user of the blocks, and stops when every rank has reported its fence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvbaton.base.ids import RequestId
from kvbaton.connector.holder import BlockHolder


@dataclass(frozen=True)
class QuarantineNews(KVConnectorWorkerMetadata):
    """What ranks tell the scheduler's half in one step; a request is named once per rank.

    Attributes:
        begun: failed, blocks may still be written.
        ended: nothing can write any more.
    """

    begun: tuple[RequestId, ...] = ()
    ended: tuple[RequestId, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "QuarantineNews":
        """Add another rank's."""
        if not isinstance(other, QuarantineNews):
            raise TypeError(f"{type(other).__name__} beside QuarantineNews")
        return QuarantineNews(self.begun + other.begun, self.ended + other.ended)


class Quarantine:
    """Blocks of requests that are being received, and which of them must outlive their request.

    Owner: the scheduler's thread.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.holder = BlockHolder()
        self._ids: dict[RequestId, tuple[int, ...]] = {}
        self._num_ranks: Counter[RequestId] = Counter()

    def watch(self, request_id: RequestId, ids: Sequence[int]) -> None:
        """These blocks are about to be written by a peer."""
        self._ids[request_id] = tuple(ids)

    def update(self, news: QuarantineNews) -> None:
        """Hold and release; to be called before vLLM frees anything this step."""
        for request_id in news.begun:
            if not self._num_ranks[request_id]:
                self.holder.hold(request_id, self._ids.get(request_id, ()))
            self._num_ranks[request_id] += 1
        for request_id in news.ended:
            self._num_ranks[request_id] -= 1
            if self._num_ranks[request_id] <= 0:
                del self._num_ranks[request_id]
                self.holder.release(request_id)

    def settled(self, request_id: RequestId) -> None:
        """All ranks have reported the request; only what is held matters now."""
        self._ids.pop(request_id, None)

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return self.holder.num_blocks
