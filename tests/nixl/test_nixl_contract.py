"""NIXL keeps the transport contract over UCX, and over LIBFABRIC where one new enough is present."""

import os
from pathlib import Path

import pytest

from kvbaton.base.ids import AgentName
from kvbaton.kv.layout import MemoryKind
from kvbaton.testing.contract import TransportContract
from kvbaton.transport.base import Transport
from kvbaton.transport.nixl import NixlTransport

pytestmark = pytest.mark.nixl


class TestUcxContract(TransportContract):
    def make_transport(self, name: AgentName) -> Transport:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        return NixlTransport(name, MemoryKind.DRAM)


class TestUcxThreadsContract(TransportContract):
    def make_transport(self, name: AgentName) -> Transport:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        return NixlTransport(name, MemoryKind.DRAM, num_threads=2, progress_thread=True)


class TestLibfabricContract(TransportContract):
    @pytest.fixture(autouse=True)
    def _libfabric(self) -> None:
        directory = os.environ.get("KVBATON_LIBFABRIC_DIR", "")
        if not directory:
            pytest.skip("KVBATON_LIBFABRIC_DIR does not name a directory with libfabric 2.5 or newer")
        if not list(Path(directory).glob("libfabric.so*")):
            pytest.skip(f"KVBATON_LIBFABRIC_DIR={directory} holds no libfabric.so")

    def make_transport(self, name: AgentName) -> Transport:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        return NixlTransport(name, MemoryKind.DRAM, backends=("LIBFABRIC",))
