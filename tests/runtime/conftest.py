"""Every test's engines are closed afterwards, and nothing may be left over."""

import gc
import threading
from collections.abc import Iterator

import pytest

from runtime.world import World


def kvbaton_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvbaton"))


@pytest.fixture
def world() -> Iterator[World]:
    before = kvbaton_threads()  # other modules' tests may have some of their own
    world = World()
    yield world
    for engine in world.engines:
        engine.close()
    assert kvbaton_threads() == before
    gc.collect()  # a socket left open is a ResourceWarning, which pytest turns into an error
