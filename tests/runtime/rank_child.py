"""A mini engine over NIXL in a process of its own, which a test can stop, continue and kill.

Arguments: name, directory port, number of blocks, bytes per block. Prints one JSON line when it is up, then obeys JSON lines:
`{"do": "prefill" | "start" | "progress" | "receive" | "report", ...}`. Reports what its courier reports, as it comes.
"""

import json
import os
import select
import sys
from typing import Any

from kvbaton.base.ids import EngineAddress, EngineId
from kvbaton.kv.layout import MemoryKind
from kvbaton.protocol.mode import Mode
from kvbaton.runtime.config import CourierConfig
from kvbaton.testing.rig import MiniEngine, Shape, agent_name
from kvbaton.transport.nixl import NixlTransport
from runtime.world import FAST

OUT = os.dup(1)


def say(**words: object) -> None:
    os.write(OUT, (json.dumps(words) + "\n").encode())


def obey(engine: MiniEngine, order: dict[str, Any]) -> None:
    match order.pop("do"):
        case "fill":
            engine.fill(order["seed"])
            say(filled=order["seed"])
        case "prefill":
            engine.prefill(order["request"], order["transfer"], order["ids"])
        case "start":
            engine.start(order["request"], order["transfer"], order["num_tokens"])
        case "progress":
            engine.progress(order["request"], order["final_tokens"], order["ids"])
        case "receive":
            host, port, engine_id = order["producer"]
            address = EngineAddress(host, port, EngineId(engine_id))
            engine.receive(
                order["request"], order["transfer"], address, order["ids"], mode=Mode(order["mode"])
            )
        case "legs":
            say(legs=engine.ask(lambda courier: courier.outbound.num_legs))


def main() -> None:
    name, port, num_blocks, block_bytes = sys.argv[1], *map(int, sys.argv[2:5])
    engine = MiniEngine(
        name,
        NixlTransport(agent_name(name), MemoryKind.DRAM),
        CourierConfig(host="127.0.0.1", heartbeat=FAST, dead_drain_s=0.3, lease_s=2.0),
        shape=Shape(num_blocks=num_blocks, block_bytes=block_bytes),
        port=port,
    )
    say(port=engine.directory.port, boot_epoch=engine.courier.address.boot_epoch)
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.01)
        if readable:
            line = sys.stdin.readline()
            if not line:
                break
            obey(engine, json.loads(line))
        new = engine.courier.take_results()
        if new.sent or new.received:
            say(sent=sorted(new.sent), received=sorted(new.received), failed=new.failed)
    engine.close()


if __name__ == "__main__":
    main()
