"""Pair: two transports with a buffer each, as contract tests use them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.base.ids import TransferHandle
from kvbaton.kv.layout import Region
from kvbaton.kv.plan import Plan
from kvbaton.transport.base import Notification, Operation, TransferState, Transport

BUFFER_BYTES = 1 << 20
BIG_BYTES = 64 << 20
TIMEOUT_S = 20.0


@dataclass(slots=True)
class Peer:
    """A transport with one registered region.

    Attributes:
        transport: the agent.
        memory: the region's bytes.
        base: its address.
    """

    transport: Transport
    memory: npt.NDArray[np.uint8]
    base: int

    @classmethod
    def start(cls, transport: Transport, num_bytes: int = BUFFER_BYTES) -> "Peer":
        """Register a fresh zeroed buffer."""
        memory = np.zeros(num_bytes, np.uint8)
        base = int(memory.ctypes.data)
        transport.register([Region(base, num_bytes, num_bytes, num_bytes, 0)])
        return cls(transport, memory, base)

    def fill(self, seed: int) -> None:
        """Write bytes that no other seed gives."""
        self.memory[:] = np.random.default_rng(seed).integers(1, 256, self.memory.shape[0], np.uint8)


@dataclass(slots=True)
class Pair:
    """Two agents, connected both ways unless a test says otherwise."""

    ours: Peer
    theirs: Peer

    def connect(self) -> None:
        """Connect both ways."""
        self.ours.transport.connect(self.theirs.transport.metadata())
        self.theirs.transport.connect(self.ours.transport.metadata())

    def swapped(self) -> "Pair":
        """The same pair seen from the other side."""
        return Pair(self.theirs, self.ours)

    def plan(self, *ranges: tuple[int, int, int]) -> Plan:
        """Ranges given as (our offset, their offset, length), all in bytes."""
        rows = np.array(ranges, np.int64).reshape(-1, 3)
        return Plan(self.ours.base + rows[:, 0], self.theirs.base + rows[:, 1], rows[:, 2].copy())

    def post(self, plan: Plan, notification: bytes, operation: Operation = Operation.WRITE) -> TransferHandle:
        """Post from ours to theirs."""
        return self.ours.transport.post(operation, self.theirs.transport.name, plan, notification)

    def finish(self, *handles: TransferHandle, num_notifications: int = 1) -> list[Notification]:
        """Drive both sides until all handles are final and the target got that many notifications."""
        arrived: list[Notification] = []

        def progress() -> bool:
            states = [self.ours.transport.poll(handle) for handle in handles]
            self.ours.transport.notifications()  # a notification may leave only while its sender keeps calling
            arrived.extend(self.theirs.transport.notifications())
            return TransferState.PENDING not in states and len(arrived) >= num_notifications

        wait_until(progress)
        return arrived

    def close(self) -> None:
        """Close both."""
        self.ours.transport.close()
        self.theirs.transport.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Call `condition`, which drives the transports, until it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s")
