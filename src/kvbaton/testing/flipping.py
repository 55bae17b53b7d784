"""Flipping: a connector whose transport changes one byte in transit when a file says so, to see that `verify` notices.

Load it by `"kv_connector": "FlippingConnector", "kv_connector_module_path": "kvbaton.testing.flipping"` with the file's path in
KVBATON_TEST_FLIP. Whoever creates the file orders one flip; taking the order deletes the file.
"""

import ctypes
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.connector.config import Settings
from kvbaton.connector.facade import BatonConnector
from kvbaton.connector.rank import RankLink, make_nixl
from kvbaton.kv.layout import MemoryKind, Region
from kvbaton.kv.plan import Plan
from kvbaton.transport.base import Notification, Operation, TransferState, Transport

ORDER_VARIABLE: Final = "KVBATON_TEST_FLIP"
SCRATCH_BYTES: Final = 4 << 20
FLIPPED_BIT: Final = 0x10


class FlippingTransport:
    """A transport between two others' ears: everything passes through, and on order one byte arrives changed.

    Neither side's source is touched: a WRITE sends its first range from a changed copy, a READ is changed where it arrived.

    Owner: as the transport's. Lifetime: as the transport's.
    """

    def __init__(self, inner: Transport, order: Path) -> None:
        """Stand in front of a transport."""
        self._inner = inner
        self._order = order
        self._scratch = ctypes.create_string_buffer(SCRATCH_BYTES)
        self._reads: dict[TransferHandle, int] = {}
        self.name = inner.name
        self.memory = inner.memory

    def register(self, regions: Sequence[Region]) -> None:
        """Register the regions, and the place for changed copies."""
        base = ctypes.addressof(self._scratch)
        self._inner.register([*regions, Region(base, SCRATCH_BYTES, SCRATCH_BYTES, SCRATCH_BYTES, group=0)])

    def metadata(self) -> bytes:
        """As the transport."""
        return self._inner.metadata()

    def connect(self, metadata: bytes) -> AgentName:
        """As the transport."""
        return self._inner.connect(metadata)

    def disconnect(self, agent: AgentName) -> None:
        """As the transport."""
        self._inner.disconnect(agent)

    def post(self, operation: Operation, agent: AgentName, plan: Plan, notification: bytes) -> TransferHandle:
        """Post, changed if ordered."""
        ordered = plan.num_ranges > 0 and plan.length[0] <= SCRATCH_BYTES and self._take_order()
        if ordered and operation is Operation.WRITE:
            plan = self._with_changed_copy(plan)
        handle = self._inner.post(operation, agent, plan, notification)
        if ordered and operation is Operation.READ:
            self._reads[handle] = int(plan.local[0]) + int(plan.length[0]) // 2
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """As the transport; an ordered READ is changed when it is done."""
        state = self._inner.poll(handle)
        if state is TransferState.DONE and handle in self._reads:
            flip(self._reads.pop(handle))
        return state

    def release(self, handle: TransferHandle) -> None:
        """As the transport."""
        self._inner.release(handle)

    def notifications(self) -> list[Notification]:
        """As the transport."""
        return self._inner.notifications()

    def close(self) -> None:
        """As the transport."""
        self._inner.close()

    def _take_order(self) -> bool:
        try:
            self._order.unlink()
        except FileNotFoundError:
            return False
        return True

    def _with_changed_copy(self, plan: Plan) -> Plan:
        copy, length = ctypes.addressof(self._scratch), int(plan.length[0])
        ctypes.memmove(copy, int(plan.local[0]), length)
        flip(copy + length // 2)
        local = plan.local.copy()
        local[0] = copy
        return dataclasses.replace(plan, local=local)


def flip(address: int) -> None:
    """Change one bit of the byte at an address of this process."""
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= FLIPPED_BIT


def make_flipping(name: AgentName, memory: MemoryKind, settings: Settings) -> Transport:
    """A NIXL agent that takes orders."""
    return FlippingTransport(make_nixl(name, memory, settings), Path(os.environ[ORDER_VARIABLE]))


class FlippingConnector(BatonConnector):
    """The connector, on a transport that takes orders."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """As the connector's, with the other transport."""
        super().__init__(vllm_config, role, kv_cache_config)
        if self._link is not None:
            self._link = RankLink(vllm_config, self._settings, kv_cache_config, make_flipping)
