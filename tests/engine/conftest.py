"""Deployments of real engines, booted on demand and shared by as many tests as possible."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from engine.asks import Answer, Ask, ask_alone, make_asks
from engine.deployment import Deployment, small, without_connector
from engine.fans import make_fans
from engine.theatre import Theatre

NUM_ASKS = 60


@pytest.fixture(scope="session")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    """Where deployments run; a lock file named in KVBATON_ENGINE_LOCK is held meanwhile."""
    stage = Theatre(tmp_path_factory.mktemp("engines"), os.environ.get("KVBATON_ENGINE_LOCK"))
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def expected(theatre: Theatre) -> list[tuple[Ask, Answer]]:
    """Requests, and what one engine without any connector answers."""
    asks = [*make_asks(1, NUM_ASKS), *make_fans(1)]
    engine = theatre.play(
        "alone", lambda folder: small(folder, prefix_caching=False), without_connector, alone=True
    )
    answers = asyncio.run(ask_alone(engine.prefill[0].url, engine.config.model, asks))
    failed = [
        f"{ask.about}: {answer.error}" for ask, answer in zip(asks, answers, strict=True) if not answer.ok
    ]
    assert not failed
    return list(zip(asks, answers, strict=True))


@pytest.fixture
def pair(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """One prefill and one decode engine that cache prefixes and verify every handoff; in front of them a router per mode."""
    return theatre.play("pair", small)
