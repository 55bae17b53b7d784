"""Every test's engines are closed afterwards, and nothing may be left over."""

import gc
import threading
from collections.abc import Iterator

import pytest

from runtime.world import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for engine in world.engines:
        engine.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("kvbaton")] == []
    gc.collect()  # a socket left open is a ResourceWarning, which pytest turns into an error
