"""Measure: one cell of one contender that is up, from vLLM's benchmark and the router's timelines to a record."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbaton.base.errors import KvbatonError
from kvbaton.bench.agent import Agent
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import Contender
from kvbaton.bench.engines import CLIENT, Lineup, Model
from kvbaton.bench.hooks import hooks_between, read_hooks
from kvbaton.bench.instrument import WRITE_EVERY_S
from kvbaton.bench.processes import Processes
from kvbaton.workload.cells import Cell, Link
from kvbaton.workload.record import CellResult, Request
from kvbaton.workload.stats import is_steady, mean, offered_load

PATIENCE_S: Final = 180.0
SLOWEST_REQUEST_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Stand:
    """A contender that is up and warm, and what is needed to measure it.

    Attributes:
        hooks: by engine, where hook times are written.
    """

    config: BenchConfig
    contender: Contender
    lineup: Lineup
    topology: str
    model: Model
    agent: Agent
    processes: Processes
    hooks: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the router noted about one request."""

    mode: str | None
    steps_s: dict[str, float]
    num_attempts: int
    failure: str | None


def run_cell(stand: Stand, cell: Cell, link: Link, repeat: int, service_s: float | None) -> CellResult:
    """Send a cell's requests and gather everything known about them.

    Raises:
        OrderFailed: the load generator failed or took far too long.
        ProcessEnded: a process ended meanwhile.
    """
    config = stand.config
    num = config.unloaded_requests if cell.rate_per_s is None else config.requests
    prefix = f"bench-{stand.contender.key}-{repeat}-{link.name}-{cell.name.replace('@', '-')}-"
    argv = benchmark_argv(
        config, stand.model, stand.lineup.target_url, cell, num, config.seed + repeat, prefix
    )
    before_s, hooks_before = stand.processes.cpu_s(), _settled_hooks(stand)
    result = stand.agent.load(argv, patience_s(cell, num))
    stand.processes.check_alive()
    after_s, hooks_after = stand.processes.cpu_s(), _settled_hooks(stand)
    timelines = fetch_timelines(stand)
    requests = requests_from(result, timelines, prefix)
    rho = offered_load(cell.rate_per_s, service_s)
    return CellResult(
        contender=stand.contender.key,
        repeat=repeat,
        link=link.name,
        topology=stand.topology,
        prompt_tokens=cell.prompt_tokens,
        output_tokens=config.output_tokens,
        rate_per_s=cell.rate_per_s,
        arrivals=config.arrivals.value,
        seed=config.seed + repeat,
        service_s=service_s if cell.rate_per_s is not None else mean_service_s(requests),
        rho=rho,
        duration_s=float(result["duration"]),
        requests=requests,
        cpu_s={name: after_s[name] - before_s.get(name, 0.0) for name in after_s if name != CLIENT},
        hooks=hooks_between(hooks_before, hooks_after),
        notes=notes_for(stand.contender, requests, rho),
    )


def benchmark_argv(
    config: BenchConfig, model: Model, url: str, cell: Cell, num_requests: int, seed: int, id_prefix: str
) -> list[str]:
    """Arguments for vLLM's serving benchmark; random prompts and arrivals are equal for equal seeds."""
    argv = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    argv += ["--model", model.path, "--served-model-name", model.served_name, "--tokenizer", model.path]
    argv += ["--dataset-name", "random", "--random-input-len", str(cell.prompt_tokens)]
    argv += ["--random-output-len", str(config.output_tokens), "--random-range-ratio", "0.0"]
    argv += ["--num-prompts", str(num_requests), "--seed", str(seed), "--ignore-eos", "--temperature", "0"]
    argv += ["--request-id-prefix", id_prefix, "--disable-tqdm", "--ready-check-timeout-sec", "0"]
    argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    if cell.rate_per_s is None:
        return [*argv, "--max-concurrency", "1"]
    return [*argv, "--request-rate", f"{cell.rate_per_s:g}", "--burstiness", str(config.arrivals.burstiness)]


def patience_s(cell: Cell, num_requests: int) -> float:
    """How long a cell may take before it counts as hung."""
    if cell.rate_per_s is None:
        return PATIENCE_S + num_requests * SLOWEST_REQUEST_S
    return PATIENCE_S + 3 * num_requests / cell.rate_per_s


def requests_from(
    result: Mapping[str, Any], timelines: Mapping[str, Timeline], id_prefix: str
) -> list[Request]:
    """Join vLLM's per-request values with the router's timelines by request id."""
    starts = result["start_times"]
    first_s = min(starts, default=0.0)
    rows = []
    for index, start_s in enumerate(starts):
        request_id = f"{id_prefix}{index}"
        timeline = timelines.get(request_id, Timeline(None, {}, 0, None))
        error = str(result["errors"][index]).strip() or timeline.failure
        rows.append(
            Request(
                request_id=request_id,
                prompt_tokens=int(result["input_lens"][index]),
                output_tokens=int(result["output_lens"][index]),
                start_s=start_s - first_s,
                ttft_s=float(result["ttfts"][index]),
                itls_s=[float(value) for value in result["itls"][index]],
                error=error.splitlines()[-1] if error else None,
                mode=timeline.mode,
                steps_s=timeline.steps_s,
                num_attempts=timeline.num_attempts,
            )
        )
    return rows


def fetch_timelines(stand: Stand) -> dict[str, Timeline]:
    """The router's timelines by the id the client sent; empty without a router."""
    if stand.lineup.router is None:
        return {}
    document = stand.agent.fetch(f"{stand.lineup.router.url}/kvbaton/requests")
    found = {}
    for record in document["requests"]:
        attempts = record["attempts"]
        if record["client_request_id"] is not None and attempts:
            last = attempts[-1]
            steps_s = {str(name): float(at_s) for name, at_s in last["steps_s"].items()}
            found[str(record["client_request_id"])] = Timeline(
                last["mode"], steps_s, len(attempts), last["failure"]
            )
    return found


def mean_service_s(requests: list[Request]) -> float | None:
    """Unloaded service time of the prefill engine: the prefill leg, or TTFT where one engine does it all."""
    legs = [request.prefill_leg_s for request in requests if request.error is None]
    known = [leg for leg in legs if leg is not None]
    if not known:
        known = [request.ttft_s for request in requests if request.error is None]
    return mean(known) if known else None


def notes_for(contender: Contender, requests: list[Request], rho: float | None) -> list[str]:
    """What a reader must know before trusting a result."""
    notes = []
    failed = [request for request in requests if request.error is not None]
    if failed:
        notes.append(f"{len(failed)} of {len(requests)} requests failed, first: {failed[0].error}")
    if contender.mode is not None:
        other = sum(request.mode not in (None, contender.mode.value) for request in requests)
        if other:
            notes.append(f"{other} requests were not handed over by {contender.mode.value}")
        if any(request.mode is None for request in requests if request.error is None):
            notes.append("the router has no timeline for some requests")
    if not is_steady(rho):
        notes.append(f"rho {rho:.2f}: not a steady state, its figures depend on how long the run was")
    return notes


def warm_up(stand: Stand, prompt_tokens: list[int], vocabulary: int = 3000) -> None:
    """Let the pair meet, compile and touch its memory before anything is timed.

    Raises:
        KvbatonError: a request failed.
    """
    bodies = [
        completion_body(stand.model, [7 + (index * 31 + tokens) % vocabulary for index in range(tokens)], 4)
        for tokens in sorted(prompt_tokens)
        for _ in range(2)
    ]
    timeout_s = PATIENCE_S + SLOWEST_REQUEST_S * len(bodies)
    stand.agent.complete(stand.lineup.target_url, bodies, at_once=1, timeout_s=timeout_s)
    stand.agent.complete(stand.lineup.target_url, bodies[:3], at_once=3, timeout_s=timeout_s)
    stand.processes.check_alive()


def completion_body(model: Model, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """A greedy completion that returns token ids."""
    return {
        "model": model.served_name,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens_of(answer: Any) -> list[int]:
    """Token ids of a completion.

    Raises:
        KvbatonError: the server does not return them.
    """
    tokens = answer["choices"][0].get("token_ids")
    if not tokens:
        raise KvbatonError(
            "the server returned no token ids, so contenders cannot be compared (vLLM 0.11 or newer does)"
        )
    return [int(token) for token in tokens]


def _settled_hooks(stand: Stand) -> dict[tuple[str, str, str], Any]:
    threading.Event().wait(2 * WRITE_EVERY_S)  # until the engines have written their last sums
    return dict(read_hooks(stand.hooks))
