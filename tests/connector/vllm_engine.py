"""vLLM's own scheduler with pretended workers: one that computes nothing, and one that keeps real KV in real memory."""

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from kvbaton.connector.metadata import BatonMetadata
    from kvbaton.connector.worker import BatonWorker
    from kvbaton.runtime.commands import PrefillProgress

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
WINDOW_TOKENS = 33
SHAPE = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


@dataclass(frozen=True)
class Wanted:
    """How to make a scheduler."""

    model: str
    role: str = "kv_producer"
    policy: str = "fail"
    window: bool = False
    num_blocks: int = 100
    overlapped: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def make_scheduler(wanted: Wanted) -> Any:
    config = EngineArgs(
        model=wanted.model,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        async_scheduling=wanted.overlapped,
        kv_transfer_config={
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "kvbaton.connector",
            "kv_role": wanted.role,
            "kv_load_failure_policy": wanted.policy,
        },
        **wanted.arguments,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = wanted.num_blocks
    groups = [KVCacheGroupSpec(["0.attn"], FullAttentionSpec(**SHAPE))]
    if wanted.window:
        groups.append(KVCacheGroupSpec(["1.attn"], SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **SHAPE)))
    init_none_hash(sha256)
    with set_current_vllm_config(config):
        return (AsyncScheduler if wanted.overlapped else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=wanted.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )


class Engine:
    """vLLM's scheduler and a worker that computes nothing; the test says what its courier reports."""

    def __init__(self, scheduler: Any, prefix: str = "r") -> None:
        self.scheduler = scheduler
        self.steps: list[BatonMetadata] = []
        self._prefix = prefix
        self._count = 0

    def add(self, num_tokens: int, params: Any = None, first: int = 1, **sampling: Any) -> str:
        self._count += 1
        options = {"max_tokens": 1, "ignore_eos": True} | sampling
        request = Request(
            f"{self._prefix}{self._count}",
            [first + index % 500 for index in range(num_tokens)],
            SamplingParams(extra_args={"kv_transfer_params": params} if params else None, **options),
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.scheduler.add_request(request)
        return request.request_id

    def step(
        self, sent: tuple[str, ...] = (), received: tuple[str, ...] = (), failed: tuple[str, ...] = ()
    ) -> list[Any]:
        """One engine step; returns the outputs for clients."""
        output = self.scheduler.schedule()
        self.steps.append(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in ids]
        tokens = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        return self._finish(output, ids, tokens, set(sent), set(received) | set(failed), set(failed))

    def commands(self, kind: type) -> list[Any]:
        return [
            command for metadata in self.steps for command in metadata.before if isinstance(command, kind)
        ]

    @property
    def frontiers(self) -> "list[PrefillProgress]":
        return [progress for metadata in self.steps for progress in metadata.after]

    @property
    def num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _finish(
        self,
        output: Any,
        ids: list[str],
        tokens: list[list[int]],
        sent: set[str],
        received: set[str],
        failed: set[str],
    ) -> list[Any]:
        found = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, tokens)
        found.kv_connector_output = KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )
        by_client = self.scheduler.update_from_output(output, found)
        return [entry for outputs in by_client.values() for entry in outputs.outputs]


class KvEngine(Engine):
    """An engine whose tokens depend on every byte of KV that attention would read.

    Each token's KV is made from its id, its place and the layer; the token sampled next is a hash over what the cache holds for all
    places before it (for the second group, within the window). One wrong or stale block changes the text.
    """

    def __init__(self, scheduler: Any, prefix: str, caches: list[torch.Tensor], depth: int) -> None:
        super().__init__(scheduler, prefix)
        self.worker: BatonWorker | None = None
        self.caches = caches
        self.text: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self._depth = depth
        self._tokens: dict[str, list[int]] = {}
        self._in_flight: deque[tuple[Any, list[str], list[list[int]], Any]] = deque()

    def turn(self) -> None:
        """Schedule and run a step; look at the oldest one's outcome once `depth` of them overlap."""
        if self.scheduler.has_requests():
            self._launch()
        if self._in_flight and (len(self._in_flight) >= self._depth or not self.scheduler.has_requests()):
            output, ids, tokens, report = self._in_flight.popleft()
            for entry in self._finish(output, ids, tokens, report.sent, report.received, report.failed):
                self.text.setdefault(entry.request_id, []).extend(entry.new_token_ids)
                if entry.finish_reason is not None:
                    self.reasons[entry.request_id] = str(entry.finish_reason)
                    self.params[entry.request_id] = entry.kv_transfer_params

    def _launch(self) -> None:
        assert self.worker is not None
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.steps.append(metadata)
        self.worker.before_forward(metadata)
        ids = list(output.num_scheduled_tokens)
        for group in range(len(self.caches)):
            for name in ids:
                self._compute(name, output.num_scheduled_tokens[name], group)
            if self.worker.tail is not None and ids:
                self.worker.tail.layer_saved(f"{group}.attn")
        tokens = [self._next(name) for name in ids]
        self.worker.after_forward(metadata)
        report = self.worker.take_report(may_wait=not metadata.has_forward)
        self._in_flight.append((output, ids, tokens, report))

    def _compute(self, name: str, num_new: int, group: int) -> None:
        request = self.scheduler.requests[name]
        tokens = self._tokens.setdefault(name, list(request.prompt_token_ids))
        table = self.scheduler.kv_cache_manager.get_block_ids(name)[group]
        end = request.num_computed_tokens  # already advanced by schedule()
        for place in range(end - num_new, end):
            row = self.caches[group][table[place // BLOCK_TOKENS]]
            row[:, place % BLOCK_TOKENS] = float(tokens[place] * 4096 + place + group)

    def _next(self, name: str) -> list[int]:
        tokens, end = self._tokens[name], self.scheduler.requests[name].num_computed_tokens
        if end < len(tokens):
            return []
        if end == len(tokens):
            tokens.append(self._sample(self.scheduler.kv_cache_manager.get_block_ids(name), end))
        return [tokens[end]]

    def _sample(self, tables: Any, end: int) -> int:
        seen = 0
        for group, table in enumerate(tables):
            first = 0 if group == 0 else max(0, end - WINDOW_TOKENS)
            for place in range(first, end):
                row = self.caches[group][table[place // BLOCK_TOKENS]]
                seen = zlib.crc32(row[:, place % BLOCK_TOKENS].contiguous().numpy(), seen)
        return 1 + seen % 499
