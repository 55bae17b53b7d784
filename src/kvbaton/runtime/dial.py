"""Dial: links that we open, by way of the engine's directory, and their connection attempts."""

import logging
from abc import ABC, abstractmethod

from kvbaton.base.errors import FailureReason, IncompatiblePeer, RemoteProtocolError, TransportError
from kvbaton.base.ids import EngineAddress, Rank
from kvbaton.protocol import peer as p
from kvbaton.runtime.channel import Channel
from kvbaton.runtime.greeting import DiallerGreeting, meet
from kvbaton.runtime.link import Link, LinkHost
from kvbaton.runtime.resolve import SocketAddress, resolve
from kvbaton.wire.frame import MAX_FRAME_BYTES
from kvbaton.wire.messages import (
    AnyMessage,
    Challenge,
    Directory,
    Identity,
    Introduce,
    Lookup,
    RankAddress,
    Refused,
    Welcome,
)

_log = logging.getLogger(__name__)


class DialledLink(Link):
    """A rank we look up in its engine's directory and dial."""

    def __init__(self, host: LinkHost, address: EngineAddress, rank: Rank) -> None:
        """Dial at the first Tick."""
        super().__init__(
            host, f"{address.engine_id}/{rank.pp}.{rank.tp}@{address.host}:{address.port}", accepted=False
        )
        self.address = address
        self.rank = rank
        self._found: RankAddress | None = None
        self._attempt: _Attempt | None = None
        self._num_probes = 0

    def _dial(self, *, probe: bool) -> None:
        self._hang_up()
        self._num_probes = self._num_probes + 1 if probe else 0
        # a machine that is gone refuses nothing; its engine's directory, back elsewhere or restarted, can tell
        if self._found is not None and self._num_probes % 2:
            self._attempt = _RankAttempt(self._host, self, self._found)
        else:
            self._attempt = _DirectoryAttempt(self._host, self)

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._attempt is not None:
            self._attempt.abandon()
            self._attempt = None

    def directory_answered(self, directory: Directory) -> None:
        """Second stage: dial the rank, if the right engine answered."""
        if directory.engine_id != self.address.engine_id:
            where = f"{self.address.host}:{self.address.port}"
            self.fail(
                FailureReason.INCOMPATIBLE,
                f"the request names engine {self.address.engine_id!r}, but {directory.engine_id!r} answers at {where}; "
                "check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, or it was restarted",
            )
            return
        for entry in directory.ranks:
            if (entry.pp, entry.tp) == (self.rank.pp, self.rank.tp):
                if self._is_another(entry.boot_epoch):
                    self.fail(
                        FailureReason.PEER_LOST, "the engine has another process for this rank", gone=True
                    )
                    return
                self._found = entry
                self._attempt = _RankAttempt(self._host, self, entry)
                return
        self.fail(
            FailureReason.INCOMPATIBLE,
            f"engine {directory.engine_id!r} has no rank pp={self.rank.pp} tp={self.rank.tp} "
            f"(tensor parallel {directory.tp_size}, pipeline parallel {directory.pp_size}, {len(directory.ranks)} up)",
        )

    def rank_answered(self, attempt: "_RankAttempt", identity: Identity) -> None:
        """The rank welcomed us: is it the process we know, and does it fit?"""
        if self._is_another(identity.boot_epoch):
            self.fail(FailureReason.PEER_LOST, "another process answers at the rank's address", gone=True)
            return
        try:
            acquaintance = meet(self._host.identity, self._host.layout, identity)
            self.channel, attempt.channel = attempt.channel, None
            self.adopt(acquaintance)
        except IncompatiblePeer as error:
            self.fail(FailureReason.INCOMPATIBLE, str(error))
        except (RemoteProtocolError, TransportError) as error:
            self.fail(FailureReason.PEER_UNREACHABLE, str(error))
        else:
            self._attempt = None
            self.feed(p.Welcomed())

    def _is_another(self, boot_epoch: int) -> bool:
        """Whether this is not the process we have met."""
        return self.acquaintance is not None and self.acquaintance.identity.boot_epoch != boot_epoch

    def fail(self, reason: FailureReason, detail: str, *, gone: bool = False) -> None:
        """The attempt is over."""
        self._hang_up()
        _log.warning("%s cannot be reached: %s", self.name, detail)
        self.feed(p.DialFailed(gone=gone, reason=reason, detail=detail))

    def closed(self, *, orderly: bool) -> None:
        """The established connection ended."""
        self.channel = None
        self.feed(p.ConnectionEnded(orderly))


class _Attempt(ABC):
    """One connection attempt: resolve, connect, greet, ask."""

    def __init__(self, host: LinkHost, link: DialledLink, where: tuple[str, int]) -> None:
        self._host = host
        self._link = link
        self._where = where
        self._abandoned = False
        self.channel: Channel | None = None
        self._greeting = DiallerGreeting(host.secret, self.ask)
        # even a literal address connects from the loop, so that no caller sees its attempt fail before it has stored it
        resolve(where[0], where[1], lambda found: host.call_soon(lambda: self._connect(found)))

    @abstractmethod
    def ask(self, proof: bytes) -> AnyMessage:
        """The message that follows the greeting."""

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._abandoned = True
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _connect(self, found: SocketAddress | OSError) -> None:
        if self._abandoned:
            return
        if isinstance(found, OSError):
            self._link.fail(FailureReason.PEER_UNREACHABLE, f"{self._where[0]} does not resolve: {found}")
            return
        try:
            self.channel = Channel.dial(self._host.selector, found.family, found.address, self)
        except OSError as error:
            self._link.fail(FailureReason.PEER_UNREACHABLE, f"{self._where[0]}:{self._where[1]}: {error}")

    def on_open(self) -> None:
        """Greet."""
        if self.channel is not None:
            self.channel.send(self._greeting.hello())
            self.channel.allow(MAX_FRAME_BYTES)

    def on_message(self, message: AnyMessage) -> None:
        """Challenge, then the answer."""
        match message:
            case Challenge() if self.channel is not None:
                try:
                    self.channel.send(self._greeting.answer(message))
                except RemoteProtocolError as error:
                    self._link.fail(FailureReason.PEER_UNREACHABLE, str(error))
            case Refused():
                reason = (
                    FailureReason.INCOMPATIBLE
                    if message.reason == "incompatible"
                    else FailureReason.PEER_UNREACHABLE
                )
                detail = message.detail
                if message.field:
                    detail = (
                        f"{message.field} differs: ours is {message.theirs}, the peer's is {message.ours}"
                    )
                self._link.fail(reason, f"refused by the peer: {detail}")
            case _:
                self.answered(message)

    @abstractmethod
    def answered(self, message: AnyMessage) -> None:
        """What was asked for came."""

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        """It ended before it led anywhere."""
        del orderly
        self.channel = None
        where = f"{self._where[0]}:{self._where[1]}"
        self._link.fail(
            FailureReason.PEER_UNREACHABLE,
            f"{where}: {detail}",
            gone=refused and isinstance(self, _RankAttempt),
        )


class _DirectoryAttempt(_Attempt):
    """Ask the engine where the rank listens."""

    def __init__(self, host: LinkHost, link: DialledLink) -> None:
        super().__init__(host, link, (link.address.host, link.address.port))

    def ask(self, proof: bytes) -> AnyMessage:
        return Lookup(proof)

    def answered(self, message: AnyMessage) -> None:
        if not isinstance(message, Directory):
            raise RemoteProtocolError(f"{type(message).__name__} instead of a directory")
        self.abandon()
        self._link.directory_answered(message)


class _RankAttempt(_Attempt):
    """Introduce ourselves to the rank; its channel becomes the link's."""

    def __init__(self, host: LinkHost, link: DialledLink, where: RankAddress) -> None:
        super().__init__(host, link, (where.host, where.port))
        self._welcomed = False

    def ask(self, proof: bytes) -> AnyMessage:
        return Introduce(self._host.identity, proof)

    def on_open(self) -> None:
        self._link.feed(p.Accepted())
        super().on_open()

    def on_message(self, message: AnyMessage) -> None:
        if self._welcomed:
            self._link.handle(message)
        else:
            super().on_message(message)

    def answered(self, message: AnyMessage) -> None:
        if not isinstance(message, Welcome):
            raise RemoteProtocolError(f"{type(message).__name__} instead of a welcome")
        self._welcomed = True
        self._link.rank_answered(self, message.identity)

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        if self._welcomed:
            _log.info("connection to %s ended: %s", self._link.name, detail)
            self._link.closed(orderly=orderly)
        else:
            super().on_closed(orderly=orderly, refused=refused, detail=detail)
