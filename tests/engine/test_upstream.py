"""Our router in front of vLLM's own connectors: a fleet can take the router first."""

import os

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import small
from engine.fans import fans_out
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.launch.config import UPSTREAM_CONNECTOR_BY_MODE
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine

FULL_VARIABLE = "KVBATON_ENGINE_FULL"


@pytest.mark.parametrize("mode", list(Mode))
async def test_our_router_in_front_of_upstream_connectors_equals_one_engine(
    theatre: Theatre, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    if not os.environ.get(FULL_VARIABLE):
        pytest.skip(f"two more boots for others' code; set {FULL_VARIABLE}=1")
    connector = UPSTREAM_CONNECTOR_BY_MODE[mode]

    deployment = theatre.play(
        connector, lambda folder: small(folder, connector=connector, mode=mode, connector_config={})
    )
    chosen = [(request, answer) for request, answer in expected if not fans_out(request)]

    answers = await ask_all(
        deployment.router(mode).url, deployment.config.model, [request for request, _ in chosen], CONCURRENCY
    )

    assert compare(chosen, answers) == []
    assert mode.value in {answer.headers.get("x-kvbaton-mode") for answer in answers}
    wait_quiet(deployment, 60)
