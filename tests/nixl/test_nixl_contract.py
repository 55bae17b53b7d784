"""NIXL keeps the transport contract over UCX."""

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
    big_bytes = 4 << 20  # two spinning progress threads on few cores leave little for copying

    def make_transport(self, name: AgentName) -> Transport:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        return NixlTransport(name, MemoryKind.DRAM, num_threads=2, progress_thread=True)
