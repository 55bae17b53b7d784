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
        after: frontiers, true once this step's forward has run.
        refused: requests to fail.
        has_forward: whether the step computes anything.
    """

    preempted: tuple[RequestId, ...] = ()
    before: tuple[Command, ...] = ()
    after: tuple[PrefillProgress, ...] = ()
    refused: tuple[Refused, ...] = ()
    has_forward: bool = False


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """Where one rank's courier listens.

    Attributes:
        address: for the engine's directory.
    """

    address: RankAddress
