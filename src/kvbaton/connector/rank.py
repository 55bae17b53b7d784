"""Rank: everything one worker process starts for its handoffs, from KV cache tensors to a running courier."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from kvbaton.base.errors import ConfigError
from kvbaton.base.ids import AgentName, EngineId, Rank
from kvbaton.connector.caches import Caches, describe_caches
from kvbaton.connector.checksum import block_checksum
from kvbaton.connector.config import Settings
from kvbaton.connector.fence import EventFence, ForwardFence, NoFence
from kvbaton.connector.fingerprint import fingerprint
from kvbaton.connector.groups import transfer_groups
from kvbaton.connector.metrics import BatonStats, RankStats
from kvbaton.connector.tail import LayerTail
from kvbaton.connector.worker import BatonWorker
from kvbaton.kv.layout import Layout, MemoryKind
from kvbaton.runtime.courier import Courier
from kvbaton.transport.base import Transport
from kvbaton.wire.messages import RankAddress

_log = logging.getLogger(__name__)

_WAIT_S: Final = {MemoryKind.DRAM: 0.025, MemoryKind.VRAM: 0.002}
"""A step without work costs about a millisecond of CPU: dear where models compute on CPUs, nothing beside a GPU."""

MakeTransport = Callable[[AgentName, MemoryKind, Settings], Transport]


def make_nixl(name: AgentName, memory: MemoryKind, settings: Settings) -> Transport:
    """A NIXL agent as the settings want it."""
    from kvbaton.transport.nixl import NixlTransport

    progress_thread = settings.progress_thread
    if progress_thread is None:
        # it spins on a core of its own: cheap beside a GPU, ruinous where the model computes on that core
        progress_thread = memory is MemoryKind.VRAM
    return NixlTransport(
        name,
        memory,
        backends=settings.backends,
        num_threads=settings.num_threads,
        progress_thread=progress_thread,
    )


class RankLink:
    """One worker's courier and the worker half in front of it.

    Owner: the worker's main thread. Lifetime: `start` once the caches exist, to `close`.
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: Settings,
        kv_cache_config: Any,
        make_transport: MakeTransport = make_nixl,
    ) -> None:
        """Start nothing yet."""
        self._vllm_config = vllm_config
        self._settings = settings
        self._kv_cache_config = kv_cache_config
        self._make_transport = make_transport
        self._courier: Courier | None = None
        self._worker: BatonWorker | None = None
        self._fence: ForwardFence | None = None
        self._stats: RankStats | None = None

    def start(self, kv_caches: Mapping[str, Any], engine_id: EngineId, agent: AgentName, host: str) -> None:
        """Register the caches and open for business.

        Raises:
            ConfigError: the caches cannot be described.
            TransportError: the memory cannot be registered, or the backend does not start.
        """
        groups = transfer_groups(self._kv_cache_config)
        caches = describe_caches(kv_caches, self._kv_cache_config, groups)
        layout = caches.layout
        parallel = self._vllm_config.parallel_config
        rank = _this_rank()
        courier = Courier.start(
            self._settings.courier(host),
            engine_id=engine_id,
            rank=rank,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            layout=layout,
            fingerprint=fingerprint(self._vllm_config),
            transport=self._make_transport(agent, layout.memory, self._settings),
            checksum=block_checksum(layout, _storages(kv_caches)),
        )
        self._courier = courier
        self._fence = _fence(layout, courier.submit)
        self._worker = BatonWorker(
            courier,
            self._fence,
            _WAIT_S[layout.memory] if self._settings.wait_s is None else self._settings.wait_s,
            self._settings.handoff_timeout_s,
            self._tail(caches, courier, self._fence),
            # a request that is to be recomputed here needs its blocks, so it waits for the fence
            fails_early=self._vllm_config.kv_transfer_config.kv_load_failure_policy == "fail",
        )
        self._stats = RankStats(f"{rank.pp}/{rank.tp}")
        _log.info(
            "KV handoff: rank %d/%d has %d regions of %s in %d groups, %d blocks",
            rank.pp,
            rank.tp,
            len(layout.regions),
            layout.memory,
            len(layout.groups),
            layout.num_blocks,
        )

    def _tail(self, caches: Caches, courier: Courier, fence: ForwardFence) -> LayerTail | None:
        if not allows_tail(self._settings, self._vllm_config.parallel_config):
            return None
        layout = caches.layout
        forced = self._settings.layer_tail is True

        def parts(num_bytes: int, tokens_left: int) -> int:
            return len(layout.regions) if forced else courier.tail_parts(num_bytes, tokens_left)

        block_bytes = [layout.group_block_bytes(index) for index in range(len(layout.groups))]
        # on a GPU the layer was only launched: the fence's thread tells the courier once the device has passed it
        return LayerTail(caches.region_by_layer, parts, block_bytes, fence.submit_after_forward)

    @property
    def worker(self) -> BatonWorker:
        """The worker half."""
        if self._worker is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._worker

    @property
    def address(self) -> RankAddress:
        """Where the courier listens."""
        if self._courier is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._courier.address

    def take_stats(self) -> BatonStats | None:
        """What the courier observed; None where nothing changed."""
        if self._courier is None or self._stats is None or not self._courier.observer.has_news:
            return None
        return self._stats.take(self._courier.take_statistics())

    def close(self) -> None:
        """Stop; idempotent."""
        if self._fence is not None:
            self._fence.close()
        if self._courier is not None:
            self._courier.close()


def allows_tail(settings: Settings, parallel_config: Any) -> bool:
    """Whether KV may leave layer by layer.

    Raises:
        ConfigError: it cannot, although it is asked for.
    """
    if not settings.stream or settings.layer_tail is False:
        return False
    if parallel_config.use_ubatching:
        # every layer is called once per microbatch, and the first call says nothing about the other microbatch's blocks
        if settings.layer_tail is True:
            raise ConfigError(
                "layer_tail", "true", "auto or false with microbatches (--enable-dbo, --ubatch-size)"
            )
        _log.info("KV handoff: no layer tail, because steps run in microbatches")
        return False
    return True


def _this_rank() -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return Rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)


def _storages(kv_caches: Mapping[str, Any]) -> Sequence[Any]:
    tensors = [
        t for cache in kv_caches.values() for t in (cache if isinstance(cache, list | tuple) else (cache,))
    ]
    return [tensor.untyped_storage() for tensor in tensors]


def _fence(layout: Layout, hand_over: Callable[[Sequence[Any]], None]) -> ForwardFence:
    if layout.memory is MemoryKind.DRAM:
        return NoFence(hand_over)

    def record() -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    return EventFence(hand_over, record)
