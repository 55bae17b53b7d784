"""Every test of the router fails if the router's own code blocks the event loop."""

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx("kvbaton.router"):
        yield
