"""Rig: engines of one rank, without vLLM, that hand real memory to each other through real couriers and sockets."""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvbaton.base.ids import AgentName, EngineAddress, EngineId, HandoffKey, Rank, RequestId, TransferId
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.kv.layout import Group, GroupKind, Layout, MemoryKind, Region
from kvbaton.protocol.mode import Mode
from kvbaton.runtime import commands as c
from kvbaton.runtime.config import CourierConfig
from kvbaton.runtime.courier import Courier
from kvbaton.runtime.directory import DirectoryServer
from kvbaton.runtime.guests import GREETING_S
from kvbaton.transport.base import Transport

T = TypeVar("T")

BLOCK_TOKENS = 16
TIMEOUT_S = 30.0
DIGEST = b"prompt"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an engine's KV cache.

    Attributes:
        kinds: one entry per KV cache group.
        num_blocks: in the pool.
        block_bytes: of one block in one region.
        num_regions: per group.
    """

    kinds: tuple[GroupKind, ...] = (GroupKind.ATTENTION,)
    num_blocks: int = 64
    block_bytes: int = 512
    num_regions: int = 2


class MiniEngine:
    """One rank with memory, courier and directory; the test plays its scheduler.

    Owner: the test's thread. Lifetime: until `close`.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        config: CourierConfig,
        *,
        shape: Shape | None = None,
        fingerprint: dict[str, str] | None = None,
        port: int = 0,
        engine_id: str | None = None,
        tp_size: int = 1,
        guest_s: float = GREETING_S,
    ) -> None:
        """Start everything.

        Args:
            name: engine id, unless `engine_id` says another.
            transport: owned from now on.
            config: of the courier.
            shape: of the KV cache.
            fingerprint: what must match.
            port: of the directory; 0 picks one.
            engine_id: what the directory answers.
            tp_size: what it claims.
            guest_s: how long its directory waits for a greeting.
        """
        self.shape = shape or Shape()
        self.name = name
        self.memory = [
            [
                np.zeros(self.shape.num_blocks * self.shape.block_bytes, np.uint8)
                for _ in range(self.shape.num_regions)
            ]
            for _ in self.shape.kinds
        ]
        self.results = c.Results()
        self.courier = Courier.start(
            config,
            engine_id=engine_id or name,
            rank=Rank(),
            tp_size=tp_size,
            pp_size=1,
            layout=self._layout(),
            fingerprint={"model": "tiny"} if fingerprint is None else fingerprint,
            transport=transport,
            checksum=self.checksum,
        )
        self.directory = DirectoryServer.start(
            "127.0.0.1", port, engine_id or name, tp_size, 1, config.secret, guest_s
        )
        self.directory.set_ranks([self.courier.address])

    @property
    def address(self) -> EngineAddress:
        """Where consumers find it."""
        return EngineAddress("127.0.0.1", self.directory.port, EngineId(self.name))

    def close(self) -> None:
        """Stop; idempotent."""
        self.courier.close()
        self.directory.close()

    # --- memory -------------------------------------------------------------------------------------------------------

    def _layout(self) -> Layout:
        shape = self.shape
        regions = tuple(
            Region(int(memory.ctypes.data), memory.nbytes, shape.block_bytes, shape.block_bytes, group)
            for group, memories in enumerate(self.memory)
            for memory in memories
        )
        groups = tuple(Group(kind, BLOCK_TOKENS) for kind in shape.kinds)
        return Layout(MemoryKind.DRAM, groups, regions, shape.num_blocks)

    def fill(self, seed: int) -> None:
        """Put bytes everywhere that no other seed gives."""
        rng = np.random.default_rng(seed)
        for memories in self.memory:
            for memory in memories:
                memory[:] = (
                    np.frombuffer(rng.bytes(memory.size), np.uint8) | 1
                )  # never zero, as untouched bytes are

    def block(self, group: int, block_id: int) -> bytes:
        """What one block holds, over all regions."""
        size = self.shape.block_bytes
        return b"".join(m[block_id * size : (block_id + 1) * size].tobytes() for m in self.memory[group])

    def blocks(self, ids: Sequence[int], group: int = 0) -> list[bytes]:
        """What several blocks hold."""
        return [self.block(group, each) for each in ids]

    def checksum(self, group: int, ids: npt.NDArray[np.int64]) -> bytes:
        """CRC-32 of every block and region, as the courier wants it."""
        size = self.shape.block_bytes
        return b"".join(
            zlib.crc32(memory[i * size : (i + 1) * size].tobytes()).to_bytes(4, "little")
            for i in ids.tolist()
            for memory in self.memory[group]
        )

    # --- the scheduler's part -----------------------------------------------------------------------------------------

    def receive(
        self,
        request: str,
        transfer: str,
        producer: EngineAddress,
        ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        mode: Mode = Mode.PUSH,
        first: int = 0,
        epoch: int = 0,
        num_tokens: int | None = None,
        ttl_s: float = 30.0,
        digest: bytes = DIGEST,
    ) -> None:
        """Ask for a handoff into these blocks; nested lists are one per group."""
        groups = _groups(ids, first)
        if num_tokens is None:
            num_tokens = max(group.end for group in groups) * BLOCK_TOKENS
        key = HandoffKey(TransferId(transfer), epoch)
        self.courier.submit(
            [c.StartReceive(RequestId(request), key, producer, mode, groups, num_tokens, digest, ttl_s)]
        )

    def start(self, request: str, transfer: str, num_tokens: int, digest: bytes = DIGEST) -> None:
        """A prefill was scheduled for the first time."""
        self.courier.submit(
            [c.PrefillStarted(RequestId(request), HandoffKey(TransferId(transfer)), num_tokens, digest)]
        )

    def progress(
        self,
        request: str,
        final_tokens: int,
        ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        first: int = 0,
        ended: bool = False,
    ) -> None:
        """A step has ended."""
        self.courier.submit([c.PrefillProgress(RequestId(request), final_tokens, ended, _groups(ids, first))])

    def finish(self, request: str) -> None:
        """The prefill's blocks are held from now on."""
        self.courier.submit([c.PrefillFinished(RequestId(request))])

    def prefill(
        self, request: str, transfer: str, ids: Sequence[int] | Sequence[Sequence[int]], num_tokens: int = 0
    ) -> None:
        """A whole prefill in one step."""
        tokens = num_tokens or max(group.end for group in _groups(ids, 0)) * BLOCK_TOKENS
        self.start(request, transfer, tokens)
        self.progress(request, tokens, ids, ended=True)
        self.finish(request)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def collect(self) -> c.Results:
        """Everything reported so far. Raises AssertionError where something is reported twice (invariant S3)."""
        new = self.courier.take_results()
        for known, more in ((self.results.sent, new.sent), (self.results.received, new.received)):
            assert not known & more, f"reported twice: {known & more}"
            known |= more
        self.results.failed.update(new.failed)
        return self.results

    def wait_sent(self, *requests: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until these prefills' blocks are free."""
        self._wait(lambda results: set(requests) <= results.sent, timeout_s)

    def wait_received(self, *requests: str, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Wait until these requests have been answered; returns those that failed."""
        self._wait(lambda results: set(requests) <= results.received, timeout_s)
        return {request: text for request, text in self.results.failed.items() if request in requests}

    def _wait(self, done: Callable[[c.Results], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done(self.collect()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.courier.wait_results(left_s):
                raise TimeoutError(f"{self.name}: not within {timeout_s:g} s; so far {self.results}")

    def ask(self, question: Callable[[Courier], T]) -> T:
        """Evaluate something on the courier's thread."""
        answer: list[T] = []
        done = threading.Event()

        def work() -> None:
            try:
                answer.append(question(self.courier))
            finally:
                done.set()

        self.courier.call_soon(work)
        if not done.wait(TIMEOUT_S) or not answer:
            raise TimeoutError(f"{self.name}: the courier does not answer")
        return answer[0]

    def until(self, condition: Callable[[Courier], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until something is true on the courier's thread."""
        wait_until(lambda: self.ask(condition), timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something is true that nothing signals."""
    pause = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s")
        pause.wait(0.002)


def agent_name(engine: str) -> AgentName:
    """An agent name that no other engine has had."""
    return AgentName(f"{engine}-{time.monotonic_ns():x}")


def _groups(ids: Sequence[int] | Sequence[Sequence[int]], first: int) -> tuple[GroupBlocks, ...]:
    nested = [list(each) for each in ids if isinstance(each, Sequence)]
    flat = [each for each in ids if not isinstance(each, Sequence)]
    return tuple(group_blocks(first, each) for each in nested) if nested else (group_blocks(first, flat),)
