"""Job: one prefill and everybody who is served from it; and what is remembered of those that have ended."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.base.ids import RequestId
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol import events
from kvbaton.protocol.lease import Lease, LeaseState
from kvbaton.runtime.drive import Drive
from kvbaton.runtime.leg import Leg

MAX_REMEMBERED: Final = 4096

JobKey = tuple[str, int]
"""Transfer id and child: what a prefill is found by."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Job:
    """One prefill, or registrations that wait for one.

    Attributes:
        key: transfer id and child; epochs only tell registrations apart.
        lease: None until the prefill is known here.
        tables: per group, the request's block ids from index 0.
        ended_at: when its last token was computed.
        progressed_at: when its latest step ended.
        is_spent: its transfer id has served another prefill already, so nobody is served from this one.
    """

    key: JobKey
    legs: list[Leg] = field(default_factory=list)
    lease: Lease | None = None
    drive: Drive[LeaseState] | None = None
    request_id: RequestId | None = None
    num_tokens: int = 0
    digest: bytes = b""
    tables: list[GroupBlocks] = field(default_factory=list)
    frontier: events.Frontier | None = None
    ended_at: float | None = None
    progressed_at: float | None = None
    is_spent: bool = False
    epoch: int = 0

    @property
    def request_name(self) -> str:
        """For records."""
        return self.request_id or ""

    def block_ids(self, group: int, start: int, end: int) -> GroupBlocks:
        """Blocks start..end-1. Raises RemoteProtocolError where the request has no such blocks."""
        if group >= len(self.tables):
            raise RemoteProtocolError(f"the request has no blocks in group {group}")
        return GroupBlocks(start, self.tables[group].between(start, end))

    @property
    def num_in_flight(self) -> int:
        """Transfers that read this prefill's blocks now."""
        return sum(leg.num_in_flight for leg in self.legs)


class Memory(Generic[K, V]):
    """The newest few thousand entries of a mapping.

    Owner: courier.
    """

    def __init__(self) -> None:
        """Remember nothing."""
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """What is remembered of a key."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Remember; the oldest goes where there are too many."""
        self._entries[key] = value
        while len(self._entries) > MAX_REMEMBERED:
            self._entries.popitem(last=False)

    def pop(self, key: K) -> V | None:
        """Forget a key and return what was known of it."""
        return self._entries.pop(key, None)
