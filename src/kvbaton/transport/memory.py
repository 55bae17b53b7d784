"""MemoryTransport: agents of one process that copy bytes between real addresses, and fail on demand."""

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.base.errors import (
    PeerUnreachable,
    TransferFailed,
    TransportError,
    UnknownHandle,
    UnregisteredRange,
)
from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.layout import MemoryKind, Region
from kvbaton.kv.plan import Int64s, Plan
from kvbaton.transport.base import Notification, Operation, TransferState
from kvbaton.transport.faults import (
    Corrupt,
    Delay,
    DropNotification,
    Fail,
    Fault,
    Hold,
    LateNotification,
    Refuse,
    RepeatNotification,
)

_MAGIC = "kvbaton-memory"


@dataclass(slots=True)
class _Agent:
    """What the network knows of one transport; owned by the network's lock."""

    name: AgentName
    incarnation: int
    regions: list[Region] = field(default_factory=list)
    inbox: list[Notification] = field(default_factory=list)
    late: list[Notification] = field(default_factory=list)
    alive: bool = True
    silent: bool = False  # a dead agent whose peers are never told
    frozen: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    operation: Operation
    initiator: _Agent
    target: _Agent
    plan: Plan
    notification: bytes
    faults: tuple[Fault, ...]
    delay_polls: int = 0
    held: bool = False
    state: TransferState = TransferState.PENDING


@dataclass(slots=True)
class _Injection:
    fault: Fault
    initiator: AgentName | None
    target: AgentName | None
    times: int


class MemoryNetwork:
    """The world that memory agents share.

    Owner: any thread; one lock guards everything, copies included, so no transfer is ever seen half done by accident.
    Faults are injected ahead of the transfers they hit: every `post` uses up one of each injection that matches it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._agents: dict[AgentName, _Agent] = {}
        self._transfers: list[_Transfer] = []  # those still PENDING
        self._injections: list[_Injection] = []
        self._incarnations = itertools.count(1)

    def inject(
        self,
        fault: Fault,
        *,
        initiator: AgentName | None = None,
        target: AgentName | None = None,
        times: int = 1,
    ) -> None:
        """Let a fault hit the next `times` transfers posted by `initiator` to `target` (None: by or to anyone)."""
        with self.lock:
            self._injections.append(_Injection(fault, initiator, target, times))

    def release_held(self) -> None:
        """Let held transfers go on with their next poll, and deliver every late notification."""
        with self.lock:
            for transfer in self._transfers:
                transfer.held = False
            for agent in self._agents.values():
                agent.inbox += agent.late
                agent.late.clear()

    def kill(self, name: AgentName, *, silently: bool = False) -> None:
        """Stop an agent for good.

        Its peers see their transfers with it fail, as after a broken connection; or, `silently`, never end, as after
        a power cut. A new agent may take its name.
        """
        with self.lock:
            agent = self._agents[name]
            agent.alive = False
            agent.silent = silently

    def freeze(self, name: AgentName) -> None:
        """Stop an agent until `thaw`: no transfer from or to it ends, no notification reaches it."""
        with self.lock:
            self._agents[name].frozen = True

    def thaw(self, name: AgentName) -> None:
        """Undo `freeze`."""
        with self.lock:
            self._agents[name].frozen = False

    def enter(self, name: AgentName) -> _Agent:
        """Add an agent (called by MemoryTransport)."""
        with self.lock:
            if name in self._agents and self._agents[name].alive:
                raise TransportError(f"an agent named {name!r} is alive on this network")
            agent = _Agent(name, next(self._incarnations))
            self._agents[name] = agent
            return agent

    def find(self, name: AgentName, incarnation: int) -> _Agent | None:
        """The live agent of that name and incarnation (a silently dead one still looks alive)."""
        agent = self._agents.get(name)
        if agent is None or agent.incarnation != incarnation or not (agent.alive or agent.silent):
            return None
        return agent

    def take_faults(self, initiator: AgentName, target: AgentName) -> tuple[Fault, ...]:
        """Use up one of each matching injection."""
        taken = []
        for injection in self._injections:
            if injection.initiator in (None, initiator) and injection.target in (None, target):
                injection.times -= 1
                taken.append(injection.fault)
        self._injections = [injection for injection in self._injections if injection.times > 0]
        return tuple(taken)

    def start(self, transfer: _Transfer) -> None:
        """Put a transfer under way."""
        self._transfers.append(transfer)

    def advance(self, transfer: _Transfer) -> TransferState:
        """One poll: move the bytes if nothing holds them back."""
        if transfer.state is not TransferState.PENDING:
            return transfer.state
        target = transfer.target
        if target.silent or target.frozen or transfer.initiator.frozen:
            return TransferState.PENDING
        if target.alive and transfer.held:
            return TransferState.PENDING
        if target.alive and transfer.delay_polls > 0:
            transfer.delay_polls -= 1
            return TransferState.PENDING
        transfer.state = self._finish(transfer)
        self._transfers.remove(transfer)
        return transfer.state

    def forget(self, agent: _Agent) -> None:
        """A transport closed: its memory may be gone, so nothing may touch it any more."""
        agent.alive = False
        agent.regions.clear()
        for transfer in [each for each in self._transfers if each.initiator is agent]:
            transfer.state = TransferState.FAILED
            self._transfers.remove(transfer)

    def abandon(self, initiator: _Agent, target: AgentName) -> None:
        """A connection was dropped: what was pending on it moves no more bytes."""
        for transfer in [each for each in self._transfers if each.initiator is initiator]:
            if transfer.target.name == target:
                transfer.state = TransferState.FAILED
                self._transfers.remove(transfer)

    def _finish(self, transfer: _Transfer) -> TransferState:
        if not transfer.target.alive:
            return TransferState.FAILED
        failure = next((fault for fault in transfer.faults if isinstance(fault, Fail)), None)
        _copy(transfer, transfer.plan.num_bytes if failure is None else failure.after_bytes)
        if failure is not None:
            return TransferState.FAILED
        self._notify(transfer)
        return TransferState.DONE

    def _notify(self, transfer: _Transfer) -> None:
        kinds = {type(fault): fault for fault in transfer.faults}
        if not transfer.notification or DropNotification in kinds:
            return
        repeat = kinds.get(RepeatNotification)
        copies = repeat.copies if isinstance(repeat, RepeatNotification) else 1
        messages = [Notification(transfer.initiator.name, transfer.notification)] * copies
        target = transfer.target
        if LateNotification in kinds:
            target.late += messages
            return
        target.inbox += [*messages, *target.late]
        target.late.clear()


class MemoryTransport:
    """One agent of a `MemoryNetwork`; implements `Transport`.

    Stricter than the contract where that finds bugs: bytes move only in the initiator's `poll`, never in `post`, and
    unregistered ranges are refused in `post` on both sides.

    Owner: one thread, as for every Transport.   Lifetime: until `close`.
    """

    def __init__(self, network: MemoryNetwork, name: AgentName) -> None:
        self.name = name
        self.memory = MemoryKind.DRAM
        self._network = network
        self._me = network.enter(name)
        self._peers: dict[AgentName, tuple[int, tuple[Region, ...]]] = {}
        self._transfers: dict[TransferHandle, _Transfer] = {}
        self._handles = itertools.count(1)
        self._closed = False

    def __repr__(self) -> str:
        return f"MemoryTransport({self.name}, peers={sorted(self._peers)}, transfers={len(self._transfers)})"

    def register(self, regions: Sequence[Region]) -> None:
        """Pin local regions."""
        self._check_open()
        if any(region.base <= 0 or region.length_bytes <= 0 for region in regions):
            raise TransportError("a region needs a positive address and length")
        with self._network.lock:
            self._me.regions += regions

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and the regions registered so far."""
        self._check_open()
        return f"{_MAGIC}:{self._me.incarnation}:{len(self._me.regions)}:{self.name}".encode()

    def connect(self, metadata: bytes) -> AgentName:
        """Make a peer reachable."""
        self._check_open()
        try:
            magic, incarnation, num_regions, name = metadata.decode().split(":", 3)
            key, limit = int(incarnation), int(num_regions)
        except ValueError as error:
            raise PeerUnreachable("the metadata is not that of a memory agent") from error
        with self._network.lock:
            agent = self._network.find(AgentName(name), key)
            if magic != _MAGIC or agent is None or agent is self._me or not 0 <= limit <= len(agent.regions):
                raise PeerUnreachable(f"no memory agent {name!r} of that incarnation is here")
            self._peers[agent.name] = (key, tuple(agent.regions[:limit]))
            return agent.name

    def disconnect(self, agent: AgentName) -> None:
        """Forget a peer; a transfer still pending with it fails."""
        if self._peers.pop(agent, None) is not None:
            with self._network.lock:
                self._network.abandon(self._me, agent)

    def post(self, operation: Operation, agent: AgentName, plan: Plan, notification: bytes) -> TransferHandle:
        """Start moving `plan`."""
        self._check_open()
        if agent not in self._peers:
            raise PeerUnreachable(f"agent {agent!r} is not connected")
        incarnation, theirs = self._peers[agent]
        with self._network.lock:
            target = self._network.find(agent, incarnation)
            if target is None:
                raise PeerUnreachable(f"agent {agent!r} is gone")
            _require_covered(self.name, self._me.regions, plan.local, plan.length, plan.local_device)
            _require_covered(agent, theirs, plan.remote, plan.length, plan.remote_device)
            faults = self._network.take_faults(self.name, agent)
            if any(isinstance(fault, Refuse) for fault in faults):
                raise TransferFailed(f"the transfer to {agent!r} was refused (injected)")
            transfer = _Transfer(operation, self._me, target, plan, notification, faults)
            transfer.delay_polls = sum(fault.polls for fault in faults if isinstance(fault, Delay))
            transfer.held = any(isinstance(fault, Hold) for fault in faults)
            self._network.start(transfer)
        handle = TransferHandle(next(self._handles))
        self._transfers[handle] = transfer
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """State of a transfer, moving its bytes if nothing holds them back."""
        transfer = self._find(handle)
        with self._network.lock:
            return self._network.advance(transfer)

    def release(self, handle: TransferHandle) -> None:
        """Give back a finished transfer's handle."""
        if self._find(handle).state is TransferState.PENDING:
            raise TransportError(f"transfer {handle} is still pending")
        del self._transfers[handle]

    def notifications(self) -> list[Notification]:
        """Everything that arrived since the last call."""
        self._check_open()
        with self._network.lock:
            if self._me.frozen:
                return []
            arrived = list(self._me.inbox)
            self._me.inbox.clear()
            return arrived

    def close(self) -> None:
        """Leave the network; pending transfers with this agent fail."""
        self._closed = True
        with self._network.lock:
            self._network.forget(self._me)
        self._peers.clear()
        self._transfers.clear()

    def _find(self, handle: TransferHandle) -> _Transfer:
        try:
            return self._transfers[handle]
        except KeyError:
            raise UnknownHandle(f"transfer {handle} was never posted here or was released") from None

    def _check_open(self) -> None:
        if self._closed or not self._me.alive:
            raise TransportError(f"agent {self.name!r} is closed or dead")


def _require_covered(
    owner: AgentName, regions: Sequence[Region], starts: Int64s, lengths: Int64s, device: int
) -> None:
    """Every range lies inside one registered region."""
    covered = lengths >= 0
    inside = np.zeros(starts.shape, np.bool_)
    for region in regions:
        if region.device == device:
            end = region.base + region.length_bytes
            inside |= (starts >= region.base) & (starts + lengths <= end)
    if not bool((covered & inside).all()):
        raise UnregisteredRange(f"a range lies outside the regions that {owner!r} registered")


def _copy(transfer: _Transfer, num_bytes: int) -> None:
    """Move the first `num_bytes` of a plan, flipping the bytes that Corrupt faults name."""
    plan = transfer.plan
    flips = [fault.offset_bytes for fault in transfer.faults if isinstance(fault, Corrupt)]
    done = 0
    for local, remote, length in zip(
        plan.local.tolist(), plan.remote.tolist(), plan.length.tolist(), strict=True
    ):
        source, sink = (local, remote) if transfer.operation is Operation.WRITE else (remote, local)
        size = min(length, num_bytes - done)
        if size <= 0:
            return
        ctypes.memmove(sink, source, size)
        for flip in flips:
            if done <= flip < done + size:
                cell = ctypes.c_ubyte.from_address(sink + flip - done)
                cell.value ^= 0xFF
        done += size
