"""AgentProcess: a NIXL agent in a process of its own, to be stopped, killed and restarted like a real peer."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.layout import MemoryKind
from kvbaton.testing.transport_pair import Pair, Peer
from kvbaton.transport.base import Operation
from kvbaton.transport.nixl import NixlTransport

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.0005

# The server imports NIXL once; its children, unlike fresh interpreters, start in milliseconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["kvbaton.testing.agent_process", "nixl"])


@dataclass(frozen=True, slots=True)
class Ready:
    """The agent is up.

    Attributes:
        metadata: how to connect to it.
        base: address of its zeroed region.
    """

    metadata: bytes
    base: int


@dataclass(frozen=True, slots=True)
class Notified:
    """A notification reached the agent."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Summed:
    """Sum of the bytes of its region."""

    total: int


@dataclass(frozen=True, slots=True)
class Posted:
    """Its WRITE is under way."""


Answer = Ready | Notified | Summed | Posted
T = TypeVar("T", Ready, Notified, Summed, Posted)


@dataclass(frozen=True, slots=True)
class Sum:
    """Ask for `Summed`."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write `num_bytes` of 0xFF to the start of a peer's region, then answer `Posted`."""

    metadata: bytes
    base: int
    num_bytes: int


Command = Sum | Write


@dataclass(slots=True)
class AgentProcess:
    """A handle on the child.

    Lifetime: `start` to `close`; `close` kills it whatever state it is in.
    """

    name: AgentName
    process: "BaseProcess"
    pipe: "Connection[Command, Answer]"
    ready: Ready
    unread: deque[Answer] = field(default_factory=deque)

    @classmethod
    def start(cls, name: AgentName, num_bytes: int) -> "AgentProcess":
        """Start the agent with one zeroed region, in our environment as it is now (UCX is configured there)."""
        ours, theirs = _processes.Pipe()
        process = _processes.Process(
            target=_serve, args=(theirs, name, num_bytes, dict(os.environ)), daemon=True
        )
        process.start()
        theirs.close()
        child = cls(name, process, ours, Ready(b"", 0))
        child.ready = child.read(Ready)
        return child

    def tell(self, command: Command) -> None:
        """Give a command."""
        self.pipe.send(command)

    def read(self, kind: type[T]) -> T:
        """The next answer of that kind; others keep."""
        for answer in self.unread:
            if isinstance(answer, kind):
                self.unread.remove(answer)
                return answer
        while self.pipe.poll(ANSWER_TIMEOUT_S):
            answer = self.pipe.recv()
            if isinstance(answer, kind):
                return answer
            self.unread.append(answer)
        raise TimeoutError(f"no {kind.__name__} from {self.name}")

    def stop(self) -> None:
        """SIGSTOP: the process freezes, its sockets stay open."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        """Kill it and close the pipe."""
        self.kill()
        self.pipe.close()

    @property
    def _pid(self) -> int:
        if self.process.pid is None:
            raise RuntimeError("the process was never started")
        return self.process.pid


def _serve(
    pipe: "Connection[Answer, Command]", name: AgentName, num_bytes: int, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    me = Peer.start(NixlTransport(name, MemoryKind.DRAM), num_bytes)
    pipe.send(Ready(me.transport.metadata(), me.base))
    posted: list[TransferHandle] = []
    while True:
        if pipe.poll(POLL_S):
            try:
                posted += _obey(me, pipe.recv(), pipe)
            except EOFError:
                return
        for handle in posted:
            me.transport.poll(handle)  # over UCX a notification leaves only when its transfer is polled
        for notification in me.transport.notifications():
            pipe.send(Notified(notification.payload))


def _obey(me: Peer, command: Command, pipe: "Connection[Answer, Command]") -> list[TransferHandle]:
    if isinstance(command, Sum):
        pipe.send(Summed(int(me.memory.sum())))
        return []
    me.memory[:] = 255
    agent = me.transport.connect(command.metadata)
    plan = Pair(me, Peer(me.transport, me.memory, command.base)).plan((0, 0, command.num_bytes))
    handle = me.transport.post(Operation.WRITE, agent, plan, b"from another process")
    me.transport.poll(handle)
    pipe.send(Posted())
    return [handle]
