"""What a courier costs while nothing moves: CPU time of its thread, alone, connected, and with a handoff that waits for its prefill.

Run: python benchmarks/idle_courier.py [seconds]
"""

import sys
import threading
import time

from kvbaton.kv.layout import MemoryKind
from kvbaton.protocol.mode import Mode
from kvbaton.runtime.config import CourierConfig
from kvbaton.testing.rig import MiniEngine, agent_name
from kvbaton.transport.base import Transport
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport


def make_transport(kind: str, network: MemoryNetwork, name: str) -> Transport:
    """An agent of the kind asked for."""
    if kind == "memory":
        return MemoryTransport(network, agent_name(name))
    from kvbaton.transport.nixl import NixlTransport

    return NixlTransport(agent_name(name), MemoryKind.DRAM)


def percent(engine: MiniEngine, seconds: float) -> float:
    """CPU time of the courier's thread, in percent of one core."""
    started_s, used_s = time.monotonic(), engine.ask(lambda _: time.thread_time())
    threading.Event().wait(seconds)
    more_s = engine.ask(lambda _: time.thread_time()) - used_s
    return 100 * more_s / (time.monotonic() - started_s)


def main() -> None:
    """Print one line per situation."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    for kind in ("memory", "nixl"):
        network = MemoryNetwork()
        producer, consumer = (
            MiniEngine(f"{name}-{kind}", make_transport(kind, network, name), CourierConfig(host="127.0.0.1"))
            for name in ("p", "d")
        )
        print(f"{kind}: alone                        {percent(consumer, seconds):6.3f} %")
        consumer.receive("r0", "t0", producer.address, [1])
        producer.prefill("q0", "t0", [1])
        consumer.wait_received("r0")
        print(f"{kind}: connected, nothing open      {percent(consumer, seconds):6.3f} %")
        consumer.receive("r1", "t1", producer.address, [2], ttl_s=600)
        producer.until(lambda courier: courier.outbound.num_legs == 1)
        print(f"{kind}: consumer waits for a prefill {percent(consumer, seconds):6.3f} %")
        print(f"{kind}: producer of that prefill     {percent(producer, seconds):6.3f} %")
        producer.prefill("q2", "t2", [3])
        consumer.receive("r2", "t2", producer.address, [3], mode=Mode.PULL)
        consumer.wait_received("r2")
        consumer.close()
        producer.close()


if __name__ == "__main__":
    main()
