"""Stand-ins for what vLLM's scheduler hands a connector: only the attributes that are used."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvbaton.base.ids import EngineAddress, EngineId
from kvbaton.connector.groups import CacheGroup
from kvbaton.connector.params import Rules, Self
from kvbaton.connector.scheduler import BatonScheduler
from kvbaton.kv.layout import GroupKind
from kvbaton.protocol.mode import Mode

BLOCK_TOKENS = 4
ATTENTION = CacheGroup(0, GroupKind.ATTENTION, BLOCK_TOKENS)
CONSUME = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "transfer_id": "t-1",
}
PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}


@dataclass
class Sampling:
    prompt_logprobs: int | None = None


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    sampling_params: Any = field(default_factory=Sampling)
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    max_tokens: int = 16

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids or ())
        self._all_token_ids = list(self.prompt_token_ids or ())


def request(request_id: str = "r", num_tokens: int = 10, params: Any = None, **more: Any) -> FakeRequest:
    return FakeRequest(request_id, list(range(100, 100 + num_tokens)), params, **more)


def scheduler(
    *groups: CacheGroup,
    produces: bool = True,
    consumes: bool = True,
    threshold_tokens: int = 1,
    peers: frozenset[str] | None = None,
    reserves_ahead: bool = False,
) -> BatonScheduler:
    return BatonScheduler(
        groups or (ATTENTION,),
        Rules(produces, consumes, Mode.PUSH, peers),
        Self(EngineAddress("10.0.0.9", 5601, EngineId("me")), 1, 1, Mode.PUSH),
        timeout_s=120.0,
        threshold_tokens=threshold_tokens,
        reserves_ahead=reserves_ahead,
    )


def step(
    new: dict[str, Sequence[Sequence[int]]] | None = None,
    cached: dict[str, Sequence[Sequence[int]] | None] | None = None,
    tokens: dict[str, int] | None = None,
    resumed: set[str] | None = None,
    computed: dict[str, int] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """What the scheduler decided for one step, blocks by request; `computed` counts tokens before it."""
    tokens, computed = tokens or {}, computed or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed.get(name, 0))
            for name, blocks in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached or {}),
            new_block_ids=list((cached or {}).values()),
            num_computed_tokens=[computed.get(name, 0) for name in cached or {}],
            resumed_req_ids=resumed or set(),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=preempted or set(),
    )


def ended(entry: FakeRequest, how: str = "FINISHED_LENGTH_CAPPED") -> FakeRequest:
    entry.status = SimpleNamespace(name=how)
    return entry
