"""The memory transport keeps the transport contract."""

import pytest

from kvbaton.base.ids import AgentName
from kvbaton.testing.contract import TransportContract
from kvbaton.transport.base import Transport
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport


class TestMemoryContract(TransportContract):
    network: MemoryNetwork

    @pytest.fixture(autouse=True)
    def _network(self) -> None:
        self.network = MemoryNetwork()

    def make_transport(self, name: AgentName) -> Transport:
        return MemoryTransport(self.network, name)
