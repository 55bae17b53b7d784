"""Directory: the engine's well-known address, which tells peers and routers where its ranks listen.

One thread in the scheduler's process. It also passes a router's Release on to every rank, so that nobody but the ranks needs to be
reachable under more than one address.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.runtime.channel import Acceptor, Channel, listen
from kvbaton.runtime.greeting import DiallerGreeting, ListenerGreeting, refusal
from kvbaton.runtime.guests import GREETING_S, GuestBook
from kvbaton.runtime.resolve import SocketAddress, resolve
from kvbaton.wire.messages import AnyMessage, Challenge, Directory, Hello, Lookup, RankAddress, Release

_log = logging.getLogger(__name__)


class DirectoryServer:
    """Answers Lookup.

    Owner: its own thread; `set_ranks` and `close` may be called from any other.
    """

    def __init__(
        self,
        sock: socket.socket,
        engine_id: str,
        tp_size: int,
        pp_size: int,
        secret: bytes | None,
        greeting_s: float = GREETING_S,
    ) -> None:
        """Take over a listening socket; `start` runs it."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._acceptor = Acceptor(self._selector, sock, self._accept)
        self.port = int(sock.getsockname()[1])
        self.secret = secret
        self._about = (engine_id, tp_size, pp_size)
        self._ranks: tuple[RankAddress, ...] = ()
        self.guests = GuestBook(time.monotonic, greeting_s)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-directory", daemon=True)

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        engine_id: str,
        tp_size: int,
        pp_size: int,
        secret: bytes | None,
        greeting_s: float = GREETING_S,
    ) -> "DirectoryServer":
        """Listen and answer. Raises OSError, naming the address, where it is taken."""
        try:
            sock = listen(host, port)
        except OSError as error:
            raise OSError(
                error.errno, f"the side channel cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        server = cls(sock, engine_id, tp_size, pp_size, secret, greeting_s)
        server._thread.start()
        return server

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Say where the ranks listen; until then lookups are answered with none."""
        self._ranks = tuple(ranks)

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._stop = True
        with contextlib.suppress(OSError):  # it has seen the flag already, and may have ended
            self._wake.send(b"x")
        self._thread.join(timeout=5)
        self._wake.close()

    def lookup(self) -> Directory:
        """The answer to Lookup."""
        engine_id, tp_size, pp_size = self._about
        return Directory(engine_id, tp_size, pp_size, list(self._ranks))

    def release(self, message: Release) -> None:
        """Pass on to every rank."""
        for rank in self._ranks:
            self.guests.enter(_Messenger(self, self._selector, rank, message))

    def _accept(self, sock: socket.socket) -> None:
        self.guests.enter(_Guest(self, self._selector, sock))

    def _on_wake(self, mask: int) -> None:  # noqa: ARG002  # the selector's callbacks share one signature
        self._woken.recv(64)

    def _run(self) -> None:
        while not self._stop:
            for key, mask in self._selector.select(self._sleep_s()):
                try:
                    key.data(mask)
                except Exception:  # noqa: BLE001  # one guest's trouble must not close the engine's door
                    _log.exception("the directory survived an unexpected error")
            self.guests.tick()
        self._acceptor.close()
        self.guests.close()
        self._selector.close()
        self._woken.close()

    def _sleep_s(self) -> float | None:
        deadline = self.guests.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())


class _Guest:
    """One connection to the directory."""

    def __init__(
        self, server: DirectoryServer, selector: selectors.BaseSelector, sock: socket.socket
    ) -> None:
        self._server = server
        self._greeting = ListenerGreeting(server.secret)
        self._admitted = False
        self.channel = Channel(selector, sock, self)

    def leave(self) -> None:
        """Hang up."""
        self.channel.close()

    def on_open(self) -> None:
        """Never: the connection was open when it came."""

    def on_message(self, message: AnyMessage) -> None:
        """Hello, Lookup, then any number of Lookup and Release."""
        try:
            self._handle(message)
        except RemoteProtocolError as error:
            _log.warning("the directory refused a dialler: %s", error)
            self.channel.send(refusal(error))
            self._server.guests.forget(self)
            self.channel.close_after_flush()

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case Hello():
                self.channel.send(self._greeting.challenge(message))
            case Lookup():
                self._greeting.admit(message)
                self._admitted = True
                self.channel.send(self._server.lookup())
            case Release() if self._admitted:
                self._server.release(message)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for the directory")
        if self._admitted:
            self._server.guests.admitted(self)

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        """Forget it."""
        del refused
        if not orderly:
            _log.debug("the directory lost a dialler: %s", detail)
        self._server.guests.forget(self)


class _Messenger:
    """Carries one Release to one rank and ends."""

    def __init__(
        self, server: DirectoryServer, selector: selectors.BaseSelector, rank: RankAddress, message: Release
    ) -> None:
        self._server = server
        self._message = message
        self._greeting = DiallerGreeting(server.secret, Lookup)
        self._selector = selector
        self._channel: Channel | None = None
        resolve(rank.host, rank.port, self._dial)

    def _dial(self, found: SocketAddress | OSError) -> None:
        if isinstance(found, OSError):
            return
        try:
            self._channel = Channel.dial(self._selector, found.family, found.address, self)
        except OSError:
            return

    def leave(self) -> None:
        """Hang up."""
        if self._channel:
            self._channel.close()

    def on_open(self) -> None:
        """Greet."""
        if self._channel:
            self._channel.send(self._greeting.hello())

    def on_message(self, message: AnyMessage) -> None:
        """Prove who we are, say it, leave."""
        if isinstance(message, Challenge) and self._channel:
            self._channel.send(self._greeting.answer(message))
            self._channel.send(self._message)
            self._server.guests.forget(self)
            self._channel.close_after_flush()

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        """A lease will do what we could not."""
        del orderly, refused
        _log.debug("a release could not be passed on: %s", detail)
        self._server.guests.forget(self)
