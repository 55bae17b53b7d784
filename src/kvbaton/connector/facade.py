"""Facade: the class vLLM instantiates, once in the scheduler's process and once per worker; it only passes on."""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvbaton.base.ids import AgentName, EngineAddress, EngineId
from kvbaton.connector import compat
from kvbaton.connector.config import Settings, parse_settings, side_channel
from kvbaton.connector.groups import transfer_groups
from kvbaton.connector.logs import follow_vllm
from kvbaton.connector.metadata import BatonMetadata, RankHandshake
from kvbaton.connector.metrics import BatonPromMetrics, BatonStats
from kvbaton.connector.params import Rules, Self
from kvbaton.connector.quarantine import QuarantineNews
from kvbaton.connector.rank import RankLink
from kvbaton.connector.rest import process_rest
from kvbaton.connector.scheduler import BatonScheduler
from kvbaton.runtime.directory import DirectoryServer

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's way in.

    Owner: whichever vLLM thread calls; each instance serves one role.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Check everything that can be checked before anything starts.

        Raises:
            ConfigError: a setting or a combination that cannot work.
        """
        follow_vllm()
        compat.require_hooks(KVConnectorBase_V1)
        compat.require_supported(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = parse_settings(transfer.kv_connector_extra_config)
        self._scheduler: BatonScheduler | None = None
        self._link: RankLink | None = None
        self._directory: DirectoryServer | None = None
        self._layer_saved: Callable[[str], None] | None = None
        self._settings = settings
        self._groups = transfer_groups(kv_cache_config)
        self._rest = process_rest()
        self._rest.allowed = settings.rest
        self._rest.shares_cores = vllm_config.device_config.device_type == "cpu"
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _scheduler(vllm_config, settings, kv_cache_config)
        else:
            self._link = RankLink(vllm_config, settings, kv_cache_config)

    # --- scheduler ----------------------------------------------------------------------------------------------------

    @property
    def _sched(self) -> BatonScheduler:
        if self._scheduler is None:
            raise RuntimeError("a scheduler hook was called on a worker's connector")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Lets sliding-window blocks be held while they are sent."""
        self._sched.producing.holder.bind(gpu_block_pool)
        self._sched.consuming.quarantine.holder.bind(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Ranks of an engine without pipeline parallelism are up."""
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): entry for tp, entry in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """All ranks are up: open the engine's directory."""
        parallel = self._vllm_config.parallel_config
        channel = side_channel(parallel.data_parallel_index)
        if self._directory is None:
            self._directory = DirectoryServer.start(
                channel.host,
                channel.port,
                str(self._kv_transfer_config.engine_id),
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                self._settings.secret,
            )
        self._directory.set_ranks(
            [entry.address for entry in metadata.values() if isinstance(entry, RankHandshake)]
        )
        _log.info(
            "KV handoff: engine %s answers at %s:%d, %d ranks, %s, %s",
            self._kv_transfer_config.engine_id,
            channel.host,
            channel.port,
            len(metadata),
            self._settings.mode,
            "+".join(self._settings.backends),
        )

    def on_new_request(self, request: "Request") -> None:
        """A request entered the engine."""
        self._sched.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:  # noqa: ARG002
        """A handoff fills every group; none may be zeroed behind it."""
        return tuple(group.index for group in self._groups)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens will come from a producer."""
        return self._sched.num_loadable(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        self._sched.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        """This step's news for the workers."""
        step = self._sched.build(scheduler_output)
        self._rest.step(step.num_tokens)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """What all workers have reported."""
        news = getattr(connector_output, "kv_connector_worker_meta", None)
        self._sched.reported(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            news if isinstance(news, QuarantineNews) else None,
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request of an engine with one cache group ended."""
        return self._sched.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return self._sched.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step once more to tell its workers something."""
        return self._sched.has_news

    # --- worker -------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> RankLink:
        if self._link is None:
            raise RuntimeError("a worker hook was called on the scheduler's connector")
        return self._link

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV cache exists: start this rank's courier."""
        engine = self._kv_transfer_config.engine_id
        name = AgentName(f"{engine}-{secrets.token_hex(6)}")
        self._rank.start(kv_caches, EngineId(str(engine)), name, side_channel(0).host)
        tail = self._rank.worker.tail
        self._layer_saved = None if tail is None else tail.layer_saved

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Where this rank's courier listens."""
        return RankHandshake(self._rank.address)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """First hook of a step."""
        self._rank.worker.before_forward(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Second hook of a step, and the first where a runner leaves that one out."""
        super().bind_connector_metadata(connector_metadata)
        self._rest.step(connector_metadata.num_tokens)
        self._rank.worker.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Too late to be useful: the work was handed over before the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests are scheduled when their KV has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """One layer's KV of this step is in the cache."""
        if self._layer_saved is not None:
            self._layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """The forward was launched."""
        self._rank.worker.after_forward(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: Collection[str]) -> Any:  # noqa: ARG002
        """What has ended."""
        step = self._connector_metadata
        may_wait = isinstance(step, BatonMetadata) and not step.has_forward
        report = self._rank.worker.take_report(may_wait=may_wait)
        return KVConnectorTransferResults(report.sent, report.received, report.failed)

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        """As `get_transfer_results`, for callers that do not ask for failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> QuarantineNews | None:
        """What the scheduler's half must hear in the step whose results were just taken."""
        return self._rank.worker.take_news()

    # --- both ---------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BatonStats | None:
        """Observations since the last call."""
        if self._link is not None:
            return self._link.take_stats()
        return self._sched.take_stats()

    def shutdown(self) -> None:
        """Stop what this instance started."""
        if self._directory is not None:
            self._directory.close()
        if self._link is not None:
            self._link.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full graphs skip the layer hook, so they are given up where the layer tail is asked for."""
        return parse_settings(extra_config).layer_tail is True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A layout with contiguous blocks."""
        return compat.required_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats:
        """Unpack what another process sent."""
        return BatonStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BatonPromMetrics:
        """Prometheus metrics of an API server."""
        return BatonPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _scheduler(vllm_config: Any, settings: Settings, kv_cache_config: Any) -> BatonScheduler:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    channel = side_channel(parallel.data_parallel_index)
    return BatonScheduler(
        transfer_groups(kv_cache_config),
        Rules(transfer.is_kv_producer, transfer.is_kv_consumer, settings.mode, settings.peers),
        Self(
            EngineAddress(channel.host, channel.port, EngineId(str(transfer.engine_id))),
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            settings.mode,
        ),
        settings.handoff_timeout_s,
        settings.recompute_threshold_tokens,
        reserves_ahead=vllm_config.speculative_config is not None,
    )
