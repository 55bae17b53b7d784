import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvbaton.connector.metrics import COUNTERS, PHASES, BatonPromMetrics, BatonStats, RankStats, engine_info
from kvbaton.runtime.observe import HANDOFF_COLUMNS


def row(**values: str | float) -> list[str | float]:
    return [values.get(column, 0) for column in HANDOFF_COLUMNS]


COMMITTED = row(side="producer", mode="push", outcome="committed", bytes=8_000_000, transfers=2, wire_s=0.5)
FAILED = row(side="producer", mode="push", outcome="peer_lost")


def vllm_config(role: str = "kv_producer", data_parallel_size: int = 1) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e-1", kv_role=role),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=data_parallel_size
        ),
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prom(registry: CollectorRegistry) -> BatonPromMetrics:
    def bound(kind):
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=registry)

    types = {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)}
    return BatonPromMetrics(vllm_config(), types, ["model_name", "engine"], {0: ["m", "0"]})


def test_metrics_read_columns_that_exist():
    assert set(COUNTERS) | set(PHASES) <= set(HANDOFF_COLUMNS)


def test_stats_of_ranks_add_up():
    one = BatonStats({"handoffs": [COMMITTED], "unexpected": {"x": 1}, "gauges": {"0/0": {"leases": 1}}})
    two = BatonStats({"handoffs": [FAILED], "unexpected": {"x": 2}, "gauges": {"0/1": {"leases": 3}}})

    both = one.aggregate(two)

    assert both.data["unexpected"] == {"x": 3}
    assert both.reduce() | {"MB moved": 8.0, "Handoffs": 1, "Failed handoffs": 1} == both.reduce()
    assert not both.is_empty()


def test_stats_travel_between_processes():
    stats = pickle.loads(pickle.dumps(BatonStats({"handoffs": [COMMITTED]})))

    assert BatonStats(stats.to_dict()).data["handoffs"] == [COMMITTED]


def test_empty_stats_share_nothing():
    BatonStats().data["handoffs"].append(COMMITTED)

    assert BatonStats().is_empty()


def test_rank_stats_are_sent_only_when_something_changed():
    rank = RankStats("0/0")

    assert rank.take({"handoffs": [], "leases": 1}) is not None
    assert rank.take({"handoffs": [], "leases": 1}) is None
    assert rank.take({"handoffs": [COMMITTED], "leases": 1}) is not None
    assert rank.take({"handoffs": [], "leases": 0}).data["gauges"] == {"0/0": {"leases": 0}}


def test_prometheus_counts_handoffs_by_outcome(prom: BatonPromMetrics, registry: CollectorRegistry):
    prom.observe(BatonStats({"handoffs": [COMMITTED, FAILED], "local": {"child": 2}}).to_dict())

    labels = {"model_name": "m", "engine": "0", "side": "producer", "mode": "push"}
    value = registry.get_sample_value
    assert value("kvbaton:handoffs_total", labels | {"outcome": "committed"}) == 1
    assert value("kvbaton:handoffs_total", labels | {"outcome": "peer_lost"}) == 1
    assert value("kvbaton:bytes_total", labels) == 8_000_000
    assert value("kvbaton:wire_seconds_sum", labels) == 0.5
    assert value("kvbaton:wire_seconds_count", labels) == 1
    assert value("kvbaton:local_requests_total", {"model_name": "m", "engine": "0", "reason": "child"}) == 2


def test_prometheus_gauges_are_the_sum_of_the_ranks_latest(
    prom: BatonPromMetrics, registry: CollectorRegistry
):
    prom.observe({"gauges": {"0/0": {"leases": 1}, "0/1": {"leases": 2}}})
    prom.observe({"gauges": {"0/1": {"leases": 5}}})

    assert registry.get_sample_value("kvbaton:leases", {"model_name": "m", "engine": "0"}) == 6


def test_prometheus_bears_stats_of_another_version(prom: BatonPromMetrics):
    prom.observe({"handoffs": [["producer"], [*COMMITTED, "new"]], "surprise": 1})


def test_prometheus_says_who_the_engine_is_before_any_request(prom, registry, monkeypatch):
    text = generate_latest(registry).decode()

    line = next(line for line in text.splitlines() if line.startswith("kvbaton:engine_info{"))
    for label in (
        'engine_id="e-1"',
        'port="5600"',
        'tp_size="2"',
        'role="prefill"',
        'connector="BatonConnector"',
    ):
        assert label in line
    assert line.endswith(" 1.0")


@pytest.mark.parametrize(
    ("role", "word"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_engine_info_names_the_role(role: str, word: str):
    assert engine_info(vllm_config(role), 0, 1)["role"] == word


def test_engine_info_of_data_parallel_engines_tells_them_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    info = engine_info(vllm_config(data_parallel_size=2), 1, 2)

    assert (info["engine_id"], info["port"]) == ("e-1_dp1", "7001")
