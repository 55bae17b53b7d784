"""Commands and results: all that engine threads and the courier say to each other."""

from dataclasses import dataclass, field

from kvbaton.base.ids import EngineAddress, HandoffKey, RequestId
from kvbaton.kv.blocks import GroupBlocks
from kvbaton.protocol.mode import Mode


@dataclass(frozen=True, slots=True)
class StartReceive:
    """Fill these blocks with the KV of a prefill; answered by exactly one entry in Results.received.

    Attributes:
        request_id: the local request that waits.
        key: the handoff.
        address: the producing engine's directory.
        mode: who posts.
        groups: per KV cache group, the blocks to fill (block index within the request, ids); empty lists allowed.
        num_tokens: of the whole prompt.
        digest: of the prompt.
        ttl_s: after this the handoff is cancelled and fails.
        tp_size: tensor-parallel size of the producing engine, as the request's parameters claim.
    """

    request_id: RequestId
    key: HandoffKey
    address: EngineAddress
    mode: Mode
    groups: tuple[GroupBlocks, ...]
    num_tokens: int
    digest: bytes
    ttl_s: float
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """The waiting request was aborted; its entry in Results.received still comes, once nothing can write any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DeclineTransfer:
    """Nothing of this prefill is needed here; the producer may free it."""

    key: HandoffKey
    address: EngineAddress


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A request whose KV may be handed off was scheduled for the first time."""

    request_id: RequestId
    key: HandoffKey
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """After a step's forward: how far the request has come.

    Attributes:
        request_id: the prefilling request.
        final_tokens: tokens whose KV is final.
        ended: the last prompt token is among them.
        groups: blocks that became part of the request since the last report, per group; `first` continues the table
            (0 after PrefillStarted or PrefillPreempted).
        tokens_left: prompt tokens that later steps compute.
    """

    request_id: RequestId
    final_tokens: int
    ended: bool
    groups: tuple[GroupBlocks, ...]
    tokens_left: int = 0


@dataclass(frozen=True, slots=True)
class PrefillTail:
    """While a step runs: in how many leading regions of the layout its tokens are final.

    Attributes:
        request_id: the prefilling request.
        num_regions: so many, in the layout's order; counts up during the step.
        final_tokens: tokens whose KV is final in these regions, as the PrefillProgress that ends the step will say.
        ended: the last prompt token is among them.
        groups: blocks that became part of the request with this step, in the first of these commands only; the
            PrefillProgress that ends the step then lists none.
    """

    request_id: RequestId
    num_regions: int
    final_tokens: int
    ended: bool
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The scheduler finished the request and keeps its blocks until Results.sent names it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrefillAborted:
    """The request ended without usable KV.

    Attributes:
        request_id: the request.
        key: the handoff, for requests that never started.
        held: the scheduler keeps its blocks until Results.sent names it.
    """

    request_id: RequestId
    key: HandoffKey
    held: bool


@dataclass(frozen=True, slots=True)
class PrefillPreempted:
    """The scheduler took the request's blocks; before they are overwritten, `Courier.wait_quiet` must have returned."""

    request_id: RequestId


Command = (
    StartReceive
    | CancelReceive
    | DeclineTransfer
    | PrefillStarted
    | PrefillProgress
    | PrefillTail
    | PrefillFinished
    | PrefillAborted
    | PrefillPreempted
)


@dataclass(slots=True)
class Results:
    """What the engine has to be told. Every request appears at most once in `sent` and once in `received`, ever.

    Attributes:
        sent: held prefills whose blocks no transfer reads any more.
        received: waiting requests whose blocks nothing writes any more.
        failed: the subset of `received` that must not be used, with a sentence for the log.
        quarantined: waiting requests that have failed although something may still write into their blocks; each appears in
            `received` and `failed` later, when nothing can.
    """

    sent: set[RequestId] = field(default_factory=set)
    received: set[RequestId] = field(default_factory=set)
    failed: dict[RequestId, str] = field(default_factory=dict)
    quarantined: dict[RequestId, str] = field(default_factory=dict)
