"""The engines of one test, on one memory network."""

import dataclasses
from typing import Any

from kvbaton.base.ids import AgentName
from kvbaton.protocol.peer import Heartbeat
from kvbaton.runtime.config import CourierConfig
from kvbaton.testing.rig import MiniEngine, agent_name
from kvbaton.transport.base import Transport
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport

FAST = Heartbeat(interval_s=0.1, lost_after_s=1.0, dial_s=1.0, pause_min_s=0.02, pause_max_s=0.1)


class World:
    """Engines of one test."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.engines: list[MiniEngine] = []

    def config(self, **settings: Any) -> CourierConfig:
        defaults = CourierConfig(host="127.0.0.1", dead_drain_s=0.02, lease_s=10.0, park_s=10.0)
        return dataclasses.replace(defaults, **settings)

    def engine(
        self,
        name: str,
        *,
        transport: Transport | None = None,
        settings: dict[str, Any] | None = None,
        **about: Any,
    ) -> MiniEngine:
        engine = MiniEngine(
            name,
            transport or MemoryTransport(self.network, agent_name(name)),
            self.config(**(settings or {})),
            **about,
        )
        self.engines.append(engine)
        return engine

    def agent(self, engine: MiniEngine) -> AgentName:
        return engine.courier.transport.name
