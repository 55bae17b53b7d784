"""Identifiers that cross module, process or machine borders."""

from dataclasses import dataclass
from typing import NewType

EngineId = NewType("EngineId", str)
"""One vLLM instance, as named by its `kv_transfer_config.engine_id`."""

RequestId = NewType("RequestId", str)
"""A request as the local scheduler names it; never leaves its engine."""

TransferId = NewType("TransferId", str)
"""One handoff attempt, minted by the router (or the producer); unguessable, so it is also the right to it."""

BootEpoch = NewType("BootEpoch", int)
"""Random 63-bit number drawn when a worker process starts; a new one means a new process."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in its engine's pool, 0..num_blocks-1."""

AgentName = NewType("AgentName", str)
"""A transport endpoint as its own process and its peers name it."""

TransferHandle = NewType("TransferHandle", int)
"""One posted transfer, unique within its transport for the life of the process."""

MAX_TRANSFER_ID_CHARS = 128


@dataclass(frozen=True, slots=True, order=True)
class HandoffKey:
    """What a registration and a prefill are matched by, and nothing else (safety invariant S5).

    Attributes:
        transfer_id: names the attempt.
        epoch: raised by the router when it retargets the same prefill to another consumer.
        child: index among the choices of one request (`n` > 1).
    """

    transfer_id: TransferId
    epoch: int = 0
    child: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """One worker of an engine.

    Attributes:
        pp: pipeline-parallel rank.
        tp: tensor-parallel rank.
    """

    pp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, order=True)
class EngineAddress:
    """Where an engine's directory listens, and who should answer there.

    Attributes:
        host: name or address of the side channel.
        port: TCP port of the side channel.
        engine_id: the engine expected there; another one answering is a misconfiguration.
    """

    host: str
    port: int
    engine_id: EngineId
