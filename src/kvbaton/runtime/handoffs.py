"""What both tables of handoffs need from the courier, and transfers that are in flight."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.base.ids import EngineAddress, RequestId
from kvbaton.kv.layout import Layout
from kvbaton.kv.plan import Plan
from kvbaton.runtime.config import CourierConfig
from kvbaton.runtime.link import Link
from kvbaton.runtime.link_speed import LinkSpeed
from kvbaton.runtime.observe import Observer
from kvbaton.transport.base import Operation

Checksum = Callable[[int, npt.NDArray[np.int64]], bytes]
"""(group, block ids) -> CRC-32 of every block and region of that group, block-major, little-endian uint32."""


class HandoffHost(Protocol):
    """What a table of handoffs needs from the courier."""

    config: CourierConfig
    layout: Layout
    observer: Observer
    checksum: Checksum
    speed: LinkSpeed

    def now(self) -> float:
        """Seconds on the courier's clock."""
        ...

    def dialled(self, address: EngineAddress) -> Link:
        """The link to our counterpart rank of another engine, new or known."""
        ...

    def post(
        self,
        operation: Operation,
        link: Link,
        plan: Plan,
        notification: bytes,
        ended: Callable[[bool, str], None],
        is_awaited: Callable[[], bool],
    ) -> None:
        """Post a transfer; `ended(ok, detail)` follows exactly once, at once where it cannot be posted.

        Where `is_awaited` says no, its end may be noticed a little late.
        """
        ...

    def report_sent(self, request_id: RequestId) -> None:
        """Tell the engine that a prefill's blocks are no longer read."""
        ...

    def report_quarantined(self, request_id: RequestId, failure: str) -> None:
        """Tell the engine that a request has failed although its blocks may still be written."""
        ...

    def report_received(self, request_id: RequestId, failure: str | None) -> None:
        """Tell the engine that a request's blocks are no longer written."""
        ...

    def rouse_engine(self) -> None:
        """End the engine's wait for results: work for it is on its way."""
        ...
