"""NixlTransport: one NIXL agent; the only module that knows NIXL exists."""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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

logger = logging.getLogger(__name__)

ERROR_BY_NIXL_NAME: Final[Mapping[str, type[TransportError]]] = {
    "nixlBackendError": TransferFailed,
    "nixlCancelledError": TransferFailed,
    "nixlInvalidParamError": TransferFailed,
    "nixlMismatchError": TransferFailed,
    "nixlNoTelemetryError": TransportError,
    "nixlNotAllowedError": TransferFailed,
    # We only ask about agents we connected, so what is not found is a registration.
    "nixlNotFoundError": UnregisteredRange,
    "nixlNotPostedError": UnknownHandle,
    "nixlNotSupportedError": TransportError,
    "nixlRemoteDisconnectError": PeerUnreachable,
    "nixlRepostActiveError": TransferFailed,
    "nixlUnknownError": TransferFailed,
}
"""Every exception NIXL exports; a name of a newer NIXL that is missing here becomes a plain TransportError."""

_STATE_BY_NIXL_WORD: Final[Mapping[str, TransferState]] = {
    "DONE": TransferState.DONE,
    "PROC": TransferState.PENDING,
    "ERR": TransferState.FAILED,
}
# What the binding itself raises for arguments it cannot convert and for backends it cannot start.
_BINDING_ERRORS: Final = (RuntimeError, ValueError, TypeError, KeyError, OverflowError)
_MAGIC: Final = b"KVBNIXL1"
_CHECKSUM_BYTES: Final = 8
_NAME_LENGTH_BYTES: Final = 2
_NUM_CLOSING_CALLS: Final = 100


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """One life of a peer as seen from here; connecting it again makes another."""

    agent: AgentName
    metadata: bytes


@dataclass(slots=True)
class _Transfer:
    connection: _Connection
    nixl_handle: Any | None  # None: NIXL holds nothing for it (no ranges, or its connection is gone)
    state: TransferState


class NixlTransport:
    """A NIXL agent behind `Transport`.

    Args:
        name: unique among all agents that may ever meet; use a new one for every process.
        memory: kind of memory of every region.
        backends: NIXL plugins by NIXL's names, for example UCX or LIBFABRIC.
        num_threads: NIXL threads that share the posting of large transfers; 0 posts on the calling thread.
        progress_thread: let NIXL spin a thread; without it transfers advance in `poll` and `notifications` only.

    Owner: one thread; the agent runs without locks (sync mode NONE).   Lifetime: until `close`.
    Cost: see docs/decisions/0002-descriptors.md. On one host `post` may itself copy the bytes (UCX over CMA does).
    """

    def __init__(
        self,
        name: AgentName,
        memory: MemoryKind,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        progress_thread: bool = False,
    ) -> None:
        nixl = _load_nixl()
        self.name = name
        self.memory = memory
        self._errors: tuple[type[Exception], ...] = (*nixl_exceptions(nixl), *_BINDING_ERRORS)
        self._registrations: list[Any] = []
        self._connections: dict[AgentName, _Connection] = {}
        self._transfers: dict[TransferHandle, _Transfer] = {}
        self._handles = itertools.count(1)
        config = nixl.nixl_agent_config(
            enable_prog_thread=progress_thread,
            num_threads=num_threads,
            backends=list(backends),
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE,
        )
        with self._translated("start the agent"):
            self._agent: Any = nixl.nixl_agent(name, config)
        # NIXL only warns about a plugin it does not have.
        if missing := [backend for backend in backends if backend not in self._agent.backends]:
            available = ", ".join(sorted(self._agent.plugin_list))
            raise TransportError(f"NIXL has no backend {', '.join(missing)}; it has {available}")

    def __repr__(self) -> str:
        return (
            f"NixlTransport({self.name}, peers={sorted(self._connections)}, transfers={len(self._transfers)})"
        )

    def register(self, regions: Sequence[Region]) -> None:
        """Pin local regions; overlapping ones are pinned as one range."""
        agent = self._open_agent()
        ranges = _merge_overlaps(regions)
        if not ranges:
            return
        with self._translated("register memory"):
            self._registrations.append(agent.register_memory(ranges, self.memory.value))

    def metadata(self) -> bytes:
        """Our name and NIXL's blob: connection info of all backends and the regions registered so far."""
        agent = self._open_agent()
        with self._translated("read our metadata"):
            blob = agent.get_agent_metadata()
        name = self.name.encode()
        body = b"".join((len(name).to_bytes(_NAME_LENGTH_BYTES, "big"), name, blob))
        return b"".join((_MAGIC, _checksum(body), body))

    def connect(self, metadata: bytes) -> AgentName:
        """Make a peer reachable; newer metadata of a known name replaces the older."""
        agent = self._open_agent()
        name, blob = _split_metadata(metadata)
        if name == self.name:
            raise PeerUnreachable("the metadata is our own")
        known = self._connections.get(name)
        if known is not None and known.metadata == metadata:
            return name
        try:
            # A restarted process under a known name has another address, which NIXL refuses until the old one is forgotten.
            self.disconnect(name)
            with self._translated("load a peer's metadata"):
                found = AgentName(_text(agent.add_remote_agent(blob)))
        except TransportError as error:
            raise PeerUnreachable(f"agent {name!r} cannot be reached: {error}") from error
        if found != name:
            agent.remove_remote_agent(found)
            raise PeerUnreachable(f"the metadata of agent {name!r} names {found!r} inside")
        self._connections[name] = _Connection(name, metadata)
        return name

    def disconnect(self, agent: AgentName) -> None:
        """Forget a peer; a transfer still pending with it fails."""
        connection = self._connections.pop(agent, None)
        if connection is None or self._agent is None:
            return
        with self._translated("disconnect"):
            self._agent.remove_remote_agent(agent)
        # NIXL's handles keep the endpoint open: only with the last of them gone does nothing move any more.
        for transfer in self._transfers.values():
            if transfer.connection is connection and transfer.state is TransferState.PENDING:
                transfer.state = TransferState.FAILED
                self._give_back(transfer)

    def post(self, operation: Operation, agent: AgentName, plan: Plan, notification: bytes) -> TransferHandle:
        """Start moving `plan`."""
        nixl_agent = self._open_agent()
        connection = self._connections.get(agent)
        if connection is None:
            raise PeerUnreachable(f"agent {agent!r} is not connected")
        if plan.num_ranges:
            transfer = self._post_ranges(operation, connection, plan, notification)
        else:
            if notification:
                with self._translated(f"notify {agent!r}"):
                    nixl_agent.send_notif(agent, notification)
            transfer = _Transfer(connection, None, TransferState.DONE)
        handle = TransferHandle(next(self._handles))
        self._transfers[handle] = transfer
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """State of a transfer, advancing it."""
        transfer = self._find(handle)
        if transfer.state is TransferState.PENDING:
            agent = transfer.connection.agent
            try:
                with self._translated("poll"):
                    state = _STATE_BY_NIXL_WORD[self._open_agent().check_xfer_state(transfer.nixl_handle)]
            except TransportError as error:
                logger.warning("transfer %d with %s failed: %s", handle, agent, error)
                state = TransferState.FAILED
            if state is TransferState.FAILED:
                self._break(agent)
            transfer.state = state
        return transfer.state

    def release(self, handle: TransferHandle) -> None:
        """Give back a finished transfer's resources."""
        transfer = self._find(handle)
        # NIXL would release a transfer in flight without a word, and its bytes would go on moving.
        if transfer.state is TransferState.PENDING:
            raise TransportError(f"transfer {handle} is still pending")
        del self._transfers[handle]
        self._give_back(transfer)

    def notifications(self) -> list[Notification]:
        """Everything that arrived since the last call, advancing incoming transfers."""
        agent = self._open_agent()
        with self._translated("read notifications"):
            arrived = agent.get_new_notifs()
        return [
            Notification(AgentName(_text(name)), bytes(payload))
            for name, payloads in arrived.items()
            for payload in payloads
        ]

    def close(self) -> None:
        """Break all connections, then deregister; transfers still pending are abandoned."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        transfers, self._transfers = list(self._transfers.values()), {}
        peers, self._connections = list(self._connections), {}
        # Connections first, so that no byte moves through a region while it is being deregistered.
        steps = [
            *(partial(agent.remove_remote_agent, peer) for peer in peers),
            *(partial(self._give_back, transfer) for transfer in transfers),
            # UCX aborts the process when an agent is destroyed while the endpoint of a peer that died is still being
            # torn down, which takes progress; one call was enough in every trial.
            *[agent.get_new_notifs] * _NUM_CLOSING_CALLS,
            *(partial(agent.deregister_memory, each) for each in self._registrations),
        ]
        self._registrations = []
        for step in steps:
            try:
                with self._translated("close the agent"):
                    step()
            except TransportError as error:
                logger.warning("agent %s: %s", self.name, error)

    def _post_ranges(
        self, operation: Operation, connection: _Connection, plan: Plan, notification: bytes
    ) -> _Transfer:
        agent = connection.agent
        kind = self.memory.value
        nixl_agent = self._agent
        with self._translated(f"prepare a transfer with {agent!r}"):
            nixl_handle = nixl_agent.initialize_xfer(
                operation.value,
                nixl_agent.get_xfer_descs(_descriptors(plan.local, plan.length, plan.local_device), kind),
                nixl_agent.get_xfer_descs(_descriptors(plan.remote, plan.length, plan.remote_device), kind),
                agent,
                notification,
            )
        try:
            with self._translated(f"post a transfer to {agent!r}"):
                state = _STATE_BY_NIXL_WORD[nixl_agent.transfer(nixl_handle)]
            if state is TransferState.FAILED:
                raise TransferFailed(f"NIXL could not post the transfer to {agent!r}")
        except TransportError:
            self._give_back(_Transfer(connection, nixl_handle, TransferState.FAILED))
            self._break(agent)
            raise
        return _Transfer(connection, nixl_handle, state)

    def _break(self, agent: AgentName) -> None:
        """Drop a peer whose transfer failed.

        NIXL reports the first descriptor that fails while others may still move. FAILED must mean that no byte moves
        any more, and there is no cancel, so the connection goes and every transfer on it fails; the peer has to be
        connected again.
        """
        try:
            self.disconnect(agent)
        except TransportError as error:
            logger.warning("dropping the connection to %s: %s", agent, error)

    def _give_back(self, transfer: _Transfer) -> None:
        nixl_handle, transfer.nixl_handle = transfer.nixl_handle, None
        if nixl_handle is not None:
            with self._translated("release a transfer"):
                nixl_handle.release()

    def _find(self, handle: TransferHandle) -> _Transfer:
        try:
            return self._transfers[handle]
        except KeyError:
            raise UnknownHandle(f"transfer {handle} was never posted here or was released") from None

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransportError(f"agent {self.name!r} is closed")
        return self._agent

    @contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            name = type(error).__name__
            kind = ERROR_BY_NIXL_NAME.get(name, TransportError)
            raise kind(f"could not {action}: {name}: {error}") from error


def nixl_exceptions(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """The exception classes NIXL exports; they share no base class."""
    found = (value for key, value in vars(nixl).items() if key.startswith("nixl"))
    return tuple(value for value in found if isinstance(value, type) and issubclass(value, Exception))


def _load_nixl() -> ModuleType:
    try:
        import nixl
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported ({error}); install the package 'nixl'") from error
    return nixl  # type: ignore[no-any-return]


def _text(name: str | bytes) -> str:
    """NIXL names agents by bytes in one call and by str in another."""
    return name.decode() if isinstance(name, bytes) else name


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _split_metadata(metadata: bytes) -> tuple[AgentName, bytes]:
    """Open the envelope; what is damaged must not reach UCX, which trusts the addresses it is given."""
    body = metadata[len(_MAGIC) + _CHECKSUM_BYTES :]
    if metadata[: -len(body) or None] != _MAGIC + _checksum(body):
        raise PeerUnreachable("the metadata is damaged or not that of a kvbaton NIXL agent")
    end = _NAME_LENGTH_BYTES + int.from_bytes(body[:_NAME_LENGTH_BYTES], "big")
    try:
        return AgentName(body[_NAME_LENGTH_BYTES:end].decode()), body[end:]
    except UnicodeDecodeError as error:
        raise PeerUnreachable("the metadata names no agent") from error


def _descriptors(starts: Int64s, lengths: Int64s, device: int) -> npt.NDArray[np.int64]:
    rows = np.empty((starts.shape[0], 3), np.int64)
    rows[:, 0] = starts
    rows[:, 1] = lengths
    rows[:, 2] = device
    return rows


def _merge_overlaps(regions: Sequence[Region]) -> list[tuple[int, int, int, str]]:
    """Address ranges in NIXL's words: layers interleaved in one allocation overlap, and pinning a page twice is waste."""
    merged: list[tuple[int, int, int, str]] = []
    for device, base, length in sorted((r.device, r.base, r.length_bytes) for r in regions):
        if length <= 0:
            raise TransportError(f"a region of {length} bytes cannot be registered")
        if merged and merged[-1][2] == device and base < merged[-1][0] + merged[-1][1]:
            start, size = merged[-1][0], merged[-1][1]
            merged[-1] = (start, max(size, base + length - start), device, "")
        else:
            merged.append((base, length, device, ""))
    return merged
