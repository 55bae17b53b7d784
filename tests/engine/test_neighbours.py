"""vLLM's own router in front of our connector: a fleet can take the connector first."""

import os
import random
import shutil

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import HOST, Deployment
from engine.fans import fans_out
from engine.quiet import wait_quiet
from kvbaton.launch.ports import free_ports
from kvbaton.launch.specs import ProcessSpec, Role, without_proxies

pytestmark = pytest.mark.engine

NUM_ASKS = 20
ROUTER_VARIABLE = "KVBATON_VLLM_ROUTER"


def vllm_router() -> str:
    """Return the program vllm-router, or skip: it wants other versions of our dependencies, so it lives elsewhere."""
    program = os.environ.get(ROUTER_VARIABLE) or shutil.which("vllm-router")
    if program is None:
        pytest.skip(f"vllm-router is not on the path; name it in {ROUTER_VARIABLE}")
    return program


def some(expected: list[tuple[Ask, Answer]]) -> list[tuple[Ask, Answer]]:
    # vllm-router hands the seed to the prefill engine, which a CPU engine may not survive; see `engine.asks.shape`.
    single = [
        (request, answer) for request, answer in expected if not fans_out(request) and not request.seeded
    ]
    return random.Random("neighbours").sample(single, NUM_ASKS)


async def test_vllm_router_in_front_of_our_connector_equals_one_engine(
    pair: Deployment, expected: list[tuple[Ask, Answer]]
) -> None:
    port, metrics_port = free_ports(HOST, 2)
    argv = (
        vllm_router(), "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin",
        "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port), "--disable-retries",
        "--prefill", pair.prefill[0].url, "--decode", pair.decode[0].url,
    )  # fmt: skip
    router = pair.add(
        ProcessSpec(
            "vllm-router",
            Role.PREFILL,  # its readiness is at /health, as an engine's
            argv,
            without_proxies(dict(os.environ)),
            pair.folder / "vllm-router.log",
            f"http://{HOST}:{port}",
        )
    )
    chosen = some(expected)
    marks = pair.trace_marks()

    answers = await ask_all(
        router.url,
        pair.config.model,
        [request.but(cache_salt="vllm-router") for request, _ in chosen],
        CONCURRENCY,
    )

    assert compare(chosen, answers) == []
    wait_quiet(pair)
    received = pair.received(marks)
    assert {trace["outcome"] for trace in received} == {"committed"}
    assert len(received) > NUM_ASKS // 2
