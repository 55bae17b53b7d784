"""Metadata: what the scheduler's half tells the workers' half each step, and what a rank tells its scheduler at start."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvbaton.base.ids import RequestId
from kvbaton.runtime.commands import Command, PrefillProgress
from kvbaton.wire.messages import RankAddress


@dataclass(frozen=True, slots=True)
class Refused:
    """A waiting request that must be reported as a failed receive.

    Attributes:
        request_id: the request.
        reason: a sentence for the log.
    """

    request_id: RequestId
    reason: str


@dataclass(frozen=True)
class BatonMetadata(KVConnectorMetadata):
    """One step's worth.

    Attributes:
        preempted: prefills that lost their blocks; the forward waits until nothing reads these.
        before: commands for the courier before the forward.
        cached: frontiers, true once the forwards before this step's have run.
        after: frontiers, true once this step's forward has run.
        refused: requests to fail.
        num_tokens: how many the step computes.
    """

    preempted: tuple[RequestId, ...] = ()
    before: tuple[Command, ...] = ()
    cached: tuple[PrefillProgress, ...] = ()
    after: tuple[PrefillProgress, ...] = ()
    refused: tuple[Refused, ...] = ()
    num_tokens: int = 0

    @property
    def has_forward(self) -> bool:
        """Whether the step computes anything."""
        return self.num_tokens > 0


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Where one rank's courier listens.

    Attributes:
        address: for the engine's directory.
    """

    address: RankAddress
