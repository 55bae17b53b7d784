"""What every rung shares: the order of the rungs, their time limits, and why one is skipped here."""

import importlib.util
import shutil
from pathlib import Path

import pytest

# Cheap rungs fail first; those that start real engines come last and, as pytest runs one test at a time, alone.
RUNGS = ("nixl", "stress", "gpu", "engine")
TIMEOUT_S = {"nixl": 120, "stress": 180, "gpu": 300, "engine": 600}


def missing_for(rung: str) -> str | None:
    """Say what this machine lacks for a rung, or None when it can run."""
    if rung == "engine" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (make install)"
    if rung == "nixl" and importlib.util.find_spec("nixl") is None:
        return "nixl is not installed (make install)"
    if rung == "gpu" and shutil.which("nvidia-smi") is None:
        return "no CUDA device on this machine"
    return None


def rungs_of(item: pytest.Item) -> list[str]:
    return [rung for rung in RUNGS if item.get_closest_marker(rung) is not None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for rung in rungs_of(item):
            reason = missing_for(rung)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"{rung}: {reason}"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S[rung]))
    items.sort(key=lambda item: max((RUNGS.index(rung) + 1 for rung in rungs_of(item)), default=0))


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback servers must be reached directly, whatever proxy the machine is configured with."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent
