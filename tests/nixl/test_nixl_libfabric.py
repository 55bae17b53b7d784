"""NIXL keeps the transport contract over LIBFABRIC, where one new enough is present."""

import os
from pathlib import Path

import pytest

from kvbaton.base.ids import AgentName
from kvbaton.kv.layout import MemoryKind
from kvbaton.testing.contract import TransportContract
from kvbaton.transport.base import Transport
from kvbaton.transport.nixl import NixlTransport

pytestmark = pytest.mark.nixl

# NIXL's plugin links against it, so the same directory has to be in LD_LIBRARY_PATH when the interpreter starts.
DIRECTORY = os.environ.get("KVBATON_LIBFABRIC_DIR", "")
if not DIRECTORY:
    pytest.skip(
        "KVBATON_LIBFABRIC_DIR names no directory with libfabric 2.5 or newer", allow_module_level=True
    )
if not list(Path(DIRECTORY).glob("libfabric.so*")):
    pytest.skip(f"KVBATON_LIBFABRIC_DIR={DIRECTORY} holds no libfabric.so", allow_module_level=True)


class TestLibfabricContract(TransportContract):
    @pytest.fixture(autouse=True)
    def _provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if "FI_PROVIDER" not in os.environ:
            monkeypatch.setenv("FI_PROVIDER", "tcp")

    def make_transport(self, name: AgentName) -> Transport:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        return NixlTransport(name, MemoryKind.DRAM, backends=("LIBFABRIC",))
