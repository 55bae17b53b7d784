"""Quiet: nothing is in flight any more, and everything that was borrowed is back."""

import json
import urllib.request

from engine.deployment import Actor, Deployment, get, samples, wait_until

ZERO_ON_ENGINES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "kvbaton:open_consumers",
    "kvbaton:open_producers",
    "kvbaton:quarantined_handoffs",
    "kvbaton:held_prefills",
    "kvbaton:waiting_requests",
    "kvbaton:leases",
)
ZERO_ON_ROUTERS = ("kvbaton_router_requests_in_flight", "kvbaton_router_queued_prompt_tokens")


def poke(engine: Actor, model: str) -> bool:
    """Send a request that needs no handoff; an idle engine reports its gauges only when it steps."""
    body = json.dumps({"model": model, "prompt": [301, 302], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", data=body, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status == 200
    except OSError:
        return False


def unrest(deployment: Deployment) -> list[str]:
    """Return what is not at rest, in words."""
    found = []
    for engine in deployment.engines:
        if not engine.runs:
            found.append(f"{engine.spec.name} has ended")
        elif not poke(engine, deployment.config.model):
            found.append(f"{engine.spec.name} does not answer")
        else:
            values = engine.gauges()
            found += [
                f"{engine.spec.name} {name}={values[name]:g}" for name in ZERO_ON_ENGINES if values.get(name)
            ]
    for router in deployment.routers:
        values = samples(get(f"{router.url}/metrics") or "")
        found += [
            f"{router.spec.name} {name}={values[name]:g}" for name in ZERO_ON_ROUTERS if values.get(name)
        ]
    return found


def wait_quiet(deployment: Deployment, limit_s: float = 20.0) -> float:
    """Wait until everything is at rest; returns how long it took."""
    last: list[str] = []

    def quiet() -> bool:
        nonlocal last
        last = unrest(deployment)
        return not last

    return wait_until(quiet, limit_s, lambda: f"not at rest: {'; '.join(last)}")
