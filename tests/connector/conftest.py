"""The connector needs vLLM: without it nothing here can be tested."""

import importlib.util

import pytest

from kvbaton.launch.model import ensure_model

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of a model small enough to be made on the spot; only its configuration is read."""
    return str(ensure_model("nano"))
