"""The router's Release, against a real directory and a real rank."""

import asyncio
import queue
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.base.ids import AgentName, EngineAddress, EngineId, HandoffKey, Rank, RequestId, TransferId
from kvbaton.kv.blocks import group_blocks
from kvbaton.kv.layout import Group, GroupKind, Layout, MemoryKind, Region
from kvbaton.policy.view import ProducerIdentity, TransferMode
from kvbaton.router.side_channel import SideChannelReleaser
from kvbaton.runtime import commands
from kvbaton.runtime.config import CourierConfig
from kvbaton.runtime.courier import Courier
from kvbaton.runtime.directory import DirectoryServer
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport

BLOCK_BYTES = 64
SECRET = b"knock knock"


class Engine:
    """A prefill engine's side channel without the engine."""

    def __init__(self) -> None:
        memory = np.zeros(16 * BLOCK_BYTES, np.uint8)
        self.memory = memory
        region = Region(memory.ctypes.data, memory.nbytes, BLOCK_BYTES, BLOCK_BYTES, 0)
        layout = Layout(MemoryKind.DRAM, (Group(GroupKind.ATTENTION, 16),), (region,), 16)
        self.directory = DirectoryServer.start("127.0.0.1", 0, "prefill", 1, 1, SECRET)
        self.courier = Courier.start(
            CourierConfig(host="127.0.0.1", secret=SECRET),
            engine_id="prefill",
            rank=Rank(),
            tp_size=1,
            pp_size=1,
            layout=layout,
            fingerprint={},
            transport=MemoryTransport(MemoryNetwork(), AgentName("prefill")),
            checksum=lambda _group, ids: zlib.crc32(ids.tobytes()).to_bytes(4, "little"),
        )
        self.directory.set_ranks([self.courier.address])
        self.identity = ProducerIdentity(EngineAddress("127.0.0.1", self.directory.port, EngineId("prefill")))

    def hold(self, transfer_id: str) -> None:
        request_id = RequestId(f"request-of-{transfer_id}")
        self.courier.submit(
            [
                commands.PrefillStarted(request_id, HandoffKey(TransferId(transfer_id)), 16, b""),
                commands.PrefillProgress(request_id, 16, True, (group_blocks(0, [3]),)),
                commands.PrefillFinished(request_id),
            ]
        )

    def close(self) -> None:
        self.courier.close()
        self.directory.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_release_held_prefill_frees_it_at_once(engine: Engine) -> None:
    engine.hold("held")

    asyncio.run(SideChannelReleaser(SECRET).release(engine.identity, TransferId("held")))

    assert engine.courier.wait_results(5)
    assert engine.courier.take_results().sent == {RequestId("request-of-held")}


def test_release_before_the_prefill_frees_it_when_it_finishes(engine: Engine) -> None:
    asyncio.run(SideChannelReleaser(SECRET).release(engine.identity, TransferId("early")))
    seen: queue.Queue[bool] = queue.Queue()
    # the rank hears of it from the directory's messenger, so ask it until the message has passed
    while ("early", 0) not in engine.courier.outbound._gone:
        engine.courier.call_soon(lambda: seen.put(True))
        seen.get(timeout=5)

    engine.hold("early")

    assert engine.courier.wait_results(5)
    assert engine.courier.take_results().sent == {RequestId("request-of-early")}


@pytest.mark.parametrize("secret", [None, b"wrong"])
def test_release_without_the_secret_is_refused(engine: Engine, secret: bytes | None) -> None:
    engine.hold("held")

    with pytest.raises(RemoteProtocolError):
        asyncio.run(SideChannelReleaser(secret).release(engine.identity, TransferId("held")))


def test_release_at_an_upstream_engine_sends_nothing() -> None:
    nowhere = EngineAddress("192.0.2.1", 1, EngineId("upstream"))

    asyncio.run(
        SideChannelReleaser().release(ProducerIdentity(nowhere, only_mode=TransferMode.PULL), TransferId("x"))
    )
