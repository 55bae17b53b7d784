"""Transport: what a mover of bytes between two agents must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.layout import MemoryKind, Region
from kvbaton.kv.plan import Plan


class Operation(Enum):
    """Who moves data which way, as seen by the initiator."""

    WRITE = "WRITE"  # initiator's memory -> target's memory
    READ = "READ"  # target's memory -> initiator's memory


class TransferState(Enum):
    """Life of a posted transfer; DONE and FAILED are final and mean that no byte moves any more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Notification:
    """A small message that arrived together with, and never before, the data of its transfer.

    Attributes:
        agent: who posted the transfer.
        payload: the bytes given to `post`.
    """

    agent: AgentName
    payload: bytes


class Transport(Protocol):
    """One agent. Every call returns at once; only the owner thread may call it.

    Order: transfers are not ordered among each other. A notification follows its own transfer's data.
    Progress: a transfer and its notification may only advance while both sides keep calling `poll` or `notifications`;
    the initiator goes on calling after DONE, as the notification may still be leaving.
    Failure: a connection on which a transfer failed is gone with every transfer on it; `connect` makes a new one.
    """

    name: AgentName
    memory: MemoryKind

    def register(self, regions: Sequence[Region]) -> None:
        """Pin local regions. Raises TransportError if the memory cannot be registered."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and its registered regions."""
        ...

    def connect(self, metadata: bytes) -> AgentName:
        """Make a peer reachable; idempotent for the same metadata. Raises PeerUnreachable on junk.

        Other metadata of a known name (a restarted peer, or more regions) replaces the connection: transfers still
        pending on the old one fail.
        """
        ...

    def disconnect(self, agent: AgentName) -> None:
        """Forget a peer; unknown names are ignored. A transfer of ours still pending with it fails: no byte of it moves any more."""
        ...

    def post(self, operation: Operation, agent: AgentName, plan: Plan, notification: bytes) -> TransferHandle:
        """Start moving `plan` (local and remote byte ranges); `notification` is delivered to the target with the data.

        A plan of no ranges only notifies. An empty notification is not delivered at all.

        Raises:
            PeerUnreachable: the agent is not connected.
            UnregisteredRange: a range is outside what either side registered (NIXL reports remote ones late or as TransferFailed).
            TransferFailed: the transport refused the transfer; nothing is in flight.
        """
        ...

    def poll(self, handle: TransferHandle) -> TransferState:
        """State of a transfer, advancing it if it can. Raises UnknownHandle."""
        ...

    def release(self, handle: TransferHandle) -> None:
        """Give back a finished transfer's resources. Raises UnknownHandle; TransportError while it is PENDING."""
        ...

    def notifications(self) -> list[Notification]:
        """Everything that arrived since the last call, advancing incoming transfers if it can."""
        ...

    def close(self) -> None:
        """Deregister and forget everything; idempotent."""
        ...
