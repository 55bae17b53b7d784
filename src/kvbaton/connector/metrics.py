"""Metrics: what couriers and scheduler observed, on its way through vLLM's stats to Prometheus."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbaton.connector.config import side_channel
from kvbaton.runtime.observe import HANDOFF_COLUMNS

GAUGES: Final = {
    "quarantined_handoffs": "Failed handoffs whose blocks a transfer may still write into",
    "quarantined_blocks": "Blocks of failed requests kept unused until nothing can write them",
    "open_consumers": "Handoffs being received",
    "open_producers": "Handoffs being sent",
    "leases": "Prefills whose KV is known to the courier",
    "held_prefills": "Finished prefills whose blocks wait for their consumer",
    "waiting_requests": "Requests whose blocks are being filled",
}
COUNTERS: Final = {
    "bytes": "KV bytes moved by committed handoffs",
    "descriptors": "Address ranges posted",
    "transfers": "Transfers posted or seen arriving",
    "streamed_bytes": "KV bytes posted before the prefill had ended",
    "checksums": "Block checksums compared and found equal",
}
PHASES: Final = {
    "register_wait_s": "Registration waiting for its prefill, or for the producer to be reachable",
    "match_s": "From both sides known to the first bytes",
    "post_s": "Planning and posting transfers",
    "wire_s": "First to last byte",
    "commit_s": "From the last byte to the commit",
    "tail_s": "From the end of the prefill to the last byte",
}
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _nothing() -> dict[str, Any]:
    return {"handoffs": [], "unexpected": {}, "local": {}, "gauges": {}}


class BatonStats(KVConnectorStats):
    """Observations of one interval; `data` is plain, because it crosses processes.

    Keys: `handoffs` (rows of HANDOFF_COLUMNS), `unexpected` and `local` (counts by reason), `gauges` (values by name, by rank).
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Wrap what another process sent, or start empty."""
        super().__init__(data=data or {})
        for key, empty in (("handoffs", []), ("unexpected", {}), ("local", {}), ("gauges", {})):
            self.data.setdefault(key, empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> "BatonStats":
        """Add another rank's, or another interval's."""
        self.data["handoffs"].extend(other.data.get("handoffs", ()))
        for key in ("unexpected", "local"):
            counts = self.data[key]
            for name, count in other.data.get(key, {}).items():
                counts[name] = counts.get(name, 0) + count
        self.data["gauges"].update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in a line of log."""
        rows = [_row(values) for values in self.data["handoffs"]]
        done = [row for row in rows if row.get("outcome") == "committed"]
        num_bytes = sum(float(row.get("bytes", 0)) for row in done)
        wire_s = sum(float(row.get("wire_s", 0)) for row in done)
        return {
            "Handoffs": len(done),
            "Failed handoffs": len(rows) - len(done),
            "MB moved": round(num_bytes / 1e6, 3),
            "Avg wire time (ms)": round(wire_s / len(done) * 1e3, 3) if done else 0,
            "Throughput (MB/s)": round(num_bytes / wire_s / 1e6, 1) if wire_s else 0,
            "Computed locally": sum(
                count for name, count in self.data["local"].items() if name != "no_params"
            ),
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


class RankStats:
    """Turns one rank's courier statistics into stats worth sending.

    Owner: the worker's main thread.
    """

    def __init__(self, rank_name: str) -> None:
        """Remember nothing yet."""
        self._rank_name = rank_name
        self._gauges: dict[str, float] = {}

    def take(self, seen: Mapping[str, Any]) -> BatonStats | None:
        """None where nothing has changed."""
        gauges = {name: value for name, value in seen.items() if isinstance(value, int | float)}
        stats = BatonStats(
            {"handoffs": list(seen.get("handoffs", ())), "unexpected": dict(seen.get("unexpected", {}))}
        )
        if gauges != self._gauges:
            self._gauges = gauges
            stats.data["gauges"] = {self._rank_name: gauges}
        return None if stats.is_empty() else stats


class BatonPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of one API server process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register everything, and say which engines stand behind this server."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauge_values: dict[tuple[int, str], Mapping[str, float]] = {}
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        by_handoff = [*labelnames, "side", "mode"]
        self._handoffs = counter("kvbaton:handoffs", "Ended handoffs", [*by_handoff, "outcome"])
        self._moved = {name: counter(f"kvbaton:{name}", text, by_handoff) for name, text in COUNTERS.items()}
        self._phases = {
            name: histogram(f"kvbaton:{name}econds", text, by_handoff, buckets=_SECONDS)
            for name, text in PHASES.items()
        }
        self._unexpected = counter(
            "kvbaton:unexpected_messages", "Messages of peers that fitted nothing", [*labelnames, "what"]
        )
        self._local = counter(
            "kvbaton:local_requests", "Requests that took no handoff", [*labelnames, "reason"]
        )
        self._gauges = {
            name: gauge(f"kvbaton:{name}", text, labelnames, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._introduce(gauge, vllm_config)

    def _introduce(self, gauge: Any, vllm_config: Any) -> None:
        engines = self.per_engine_labelvalues
        info = {index: engine_info(vllm_config, index, len(engines)) for index in engines}
        names = [*self._labelnames, *next(iter(info.values()), {})]
        about = gauge(
            "kvbaton:engine_info",
            "The engine behind this server, as peers and routers address it",
            names,
            multiprocess_mode="mostrecent",
        )
        for index, values in engines.items():
            about.labels(*values, *info[index].values()).set(1)
            for entry in self._gauges.values():
                entry.labels(*values).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval; what another version wrote differently is left out rather than fatal."""
        labels = self.per_engine_labelvalues[engine_idx]
        for values in transfer_stats_data.get("handoffs", ()):
            self._observe_handoff(labels, _row(values))
        for what, count in transfer_stats_data.get("unexpected", {}).items():
            self._unexpected.labels(*labels, what).inc(count)
        for reason, count in transfer_stats_data.get("local", {}).items():
            self._local.labels(*labels, reason).inc(count)
        for rank, gauges in transfer_stats_data.get("gauges", {}).items():
            self._gauge_values[engine_idx, rank] = gauges
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(self._sum(engine_idx, name))

    def _observe_handoff(self, labels: Sequence[object], row: Mapping[str, Any]) -> None:
        side, mode, outcome = (str(row.get(name, "")) for name in ("side", "mode", "outcome"))
        self._handoffs.labels(*labels, side, mode, outcome).inc()
        if outcome != "committed":
            return
        for name, counter in self._moved.items():
            counter.labels(*labels, side, mode).inc(float(row.get(name, 0)))
        for name, histogram in self._phases.items():
            if name in row:
                histogram.labels(*labels, side, mode).observe(float(row[name]))

    def _sum(self, engine_idx: int, name: str) -> float:
        return sum(
            float(gauges.get(name, 0))
            for (index, _), gauges in self._gauge_values.items()
            if index == engine_idx
        )


def engine_info(vllm_config: Any, index: int, num_engines: int) -> dict[str, str]:
    """Who an engine is, as labels; a router reads its identity from these.

    Args:
        vllm_config: the API server's.
        index: the engine's data-parallel index.
        num_engines: data-parallel engines behind this server.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    parallel_engines = max(num_engines, int(getattr(parallel, "data_parallel_size", 1)))
    channel = side_channel(index)
    return {
        # vLLM's engine process adds the suffix itself, out of our sight
        "engine_id": f"{transfer.engine_id}_dp{index}" if parallel_engines > 1 else str(transfer.engine_id),
        "host": channel.host,
        "port": str(channel.port),
        "tp_size": str(parallel.tensor_parallel_size),
        "pp_size": str(parallel.pipeline_parallel_size),
        "role": {"kv_producer": "prefill", "kv_consumer": "decode"}.get(transfer.kv_role, "both"),
        "connector": "BatonConnector",
    }


def _row(values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(HANDOFF_COLUMNS, values, strict=False))
