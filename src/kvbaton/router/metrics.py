"""The router's Prometheus metrics, in a registry of their own."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvbaton.policy.view import FleetView
from kvbaton.router.timeline import AttemptTimeline, Step

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LEGS = (
    ("prefill", Step.PREFILL_SENT, Step.PREFILL_DONE),
    ("decode_head", Step.DECODE_SENT, Step.DECODE_HEAD),
    ("decode_first_byte", Step.DECODE_SENT, Step.FIRST_BYTE),
    ("decode", Step.DECODE_SENT, Step.LAST_BYTE),
    ("exposed", Step.PREFILL_DONE, Step.FIRST_BYTE),
)


class FleetSource(Protocol):
    """Whatever can show the fleet as it is now."""

    def view(self) -> FleetView:
        """The fleet as it is now."""


class _FleetCollector(Collector):
    def __init__(self, source: FleetSource) -> None:
        self._source = source

    def collect(self) -> Iterator[GaugeMetricFamily]:
        fleet = self._source.view()
        labels = ["role", "engine"]
        up = GaugeMetricFamily("kvbaton_router_engine_up", "Whether the engine answers.", labels=labels)
        known = GaugeMetricFamily(
            "kvbaton_router_identity_known", "Whether a producer is known.", labels=["engine"]
        )
        running = GaugeMetricFamily("kvbaton_router_requests_in_flight", "Legs in flight.", labels=labels)
        queued = GaugeMetricFamily(
            "kvbaton_router_queued_prompt_tokens", "Prompt tokens in flight.", labels=["engine"]
        )
        for role, engines in (("prefill", fleet.prefill), ("decode", fleet.decode)):
            for engine in engines:
                up.add_metric([role, engine.name], float(engine.up))
                running.add_metric([role, engine.name], engine.running_requests)
        for engine in fleet.prefill:
            known.add_metric([engine.name], float(engine.identity is not None))
            queued.add_metric([engine.name], engine.queued_tokens)
        yield from (up, known, running, queued)


class Metrics:
    """Counters and histograms of one router.

    Owner: the router's event loop.
    """

    def __init__(self, fleet: FleetSource) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(fleet))
        prefix, registry = "kvbaton_router_", self._registry
        self._requests = Counter(
            prefix + "requests", "Requests ended.", ["mode", "reason", "outcome"], registry=registry
        )
        self._failures = Counter(
            prefix + "failures", "Failed attempts.", ["stage", "kind"], registry=registry
        )
        self._retries = Counter(prefix + "retries", "Attempts after the first.", registry=registry)
        self._mismatches = Counter(
            prefix + "identity_mismatches",
            "Prefill answers naming another producer.",
            ["engine"],
            registry=registry,
        )
        self._releases = Counter(
            prefix + "releases", "Abandoned KV given back to its producer.", ["outcome"], registry=registry
        )
        self._probes = Counter(
            prefix + "identity_probes", "Ways identities were learnt.", ["source"], registry=registry
        )
        self._legs = Histogram(
            prefix + "leg_seconds",
            "Durations within an attempt.",
            ["leg"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_byte = Histogram(
            prefix + "time_to_first_byte_seconds",
            "From arrival.",
            ["mode"],
            buckets=_SECONDS,
            registry=registry,
        )

    def request_ended(self, mode: str, reason: str, outcome: str) -> None:
        """Count one client request."""
        self._requests.labels(mode, reason, outcome).inc()

    def attempt_failed(self, stage: str, kind: str) -> None:
        """Count one failed attempt."""
        self._failures.labels(stage, kind).inc()

    def retried(self) -> None:
        """Count one further attempt."""
        self._retries.inc()

    def identity_mismatched(self, engine: str) -> None:
        """Count a prefill answer that named another producer than its decode leg was given."""
        self._mismatches.labels(engine).inc()

    def released(self, outcome: str) -> None:
        """Count one release."""
        self._releases.labels(outcome).inc()

    def identity_learnt(self, source: str) -> None:
        """Count one identity learnt."""
        self._probes.labels(source).inc()

    def attempt_ended(self, attempt: AttemptTimeline) -> None:
        """Record the durations of an attempt that reached the client."""
        for leg, start, end in _LEGS:
            duration_s = attempt.between_s(start, end)
            if duration_s is not None:
                self._legs.labels(leg).observe(duration_s)
        first_byte_s = attempt.steps_s.get(Step.FIRST_BYTE)
        if first_byte_s is not None:
            self._first_byte.labels(attempt.mode).observe(first_byte_s)

    def render(self) -> bytes:
        """The text Prometheus scrapes."""
        return generate_latest(self._registry)

    def sample(self, name: str, labels: Iterable[tuple[str, str]] = ()) -> float:
        """One current value by its full name; 0 if never touched."""
        return self._registry.get_sample_value(name, dict(labels)) or 0.0
