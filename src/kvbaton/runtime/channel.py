"""Channel: one non-blocking side-channel connection that carries framed messages."""

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Protocol

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.wire.frame import MAX_FRAME_BYTES, Deframer, frame
from kvbaton.wire.messages import AnyMessage, decode, encode

_READ_BYTES = 1 << 18
_MAX_OUTBOX_BYTES = 2 * MAX_FRAME_BYTES


class ChannelListener(Protocol):
    """Who is told what happens on a channel."""

    def on_open(self) -> None:
        """The connection was established."""
        ...

    def on_message(self, message: AnyMessage) -> None:
        """A message came; RemoteProtocolError closes the channel."""
        ...

    def on_closed(self, *, orderly: bool, refused: bool, detail: str) -> None:
        """The connection ended or could not be made; called at most once, never by `close`.

        Args:
            orderly: the other kernel closed it.
            refused: the other kernel says that nobody listens there.
            detail: for people.
        """
        ...


class Channel:
    """A socket registered with a selector.

    Owner: the thread that runs the selector. Lifetime: until `close`, or on_closed.
    """

    def __init__(
        self, selector: selectors.BaseSelector, sock: socket.socket, listener: ChannelListener
    ) -> None:
        """Take over a connected socket."""
        self._selector = selector
        self._socket: socket.socket | None = sock
        self._listener = listener
        self._deframer = Deframer()
        self._outbox = bytearray()
        self._connecting = False
        self._closing = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, selectors.EVENT_READ, self.on_ready)

    @classmethod
    def dial(
        cls,
        selector: selectors.BaseSelector,
        family: int,
        address: tuple[str | int | bytes, ...],
        listener: ChannelListener,
    ) -> "Channel":
        """Start connecting; on_open or on_closed follows. Raises OSError where the kernel refuses at once."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, str(code)))
            channel = cls(selector, sock, listener)
        except OSError:
            sock.close()
            raise
        channel._connecting = True
        selector.modify(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, channel.on_ready)
        return channel

    @property
    def is_open(self) -> bool:
        """Whether messages can still be queued."""
        return self._socket is not None and not self._closing

    def local_host(self) -> str:
        """Our address on this connection."""
        return str(self._socket.getsockname()[0]) if self._socket else ""

    def allow(self, max_bytes: int) -> None:
        """Accept messages up to this size, now that more is known of the peer."""
        self._deframer.max_bytes = max_bytes

    def send(self, message: AnyMessage) -> None:
        """Queue a message and send what the socket takes now; a dead channel drops it."""
        if not self.is_open:
            return
        self._outbox += frame(encode(message))
        if len(self._outbox) > _MAX_OUTBOX_BYTES:
            self._end(orderly=False, refused=False, detail="the peer does not read what it is sent")
            return
        if not self._connecting:
            self._flush()

    def close_after_flush(self) -> None:
        """Send what is queued, then close without telling the listener."""
        self._closing = True
        if not self._outbox:
            self.close()

    def close(self) -> None:
        """Close now; the listener is not told."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def on_ready(self, mask: int) -> None:
        """Handle readiness as the selector reports it."""
        if self._connecting:
            self._finish_connecting()
            return
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ and self._socket is not None:
            self._read()

    def _finish_connecting(self) -> None:
        if self._socket is None:
            return
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            refused = code == errno.ECONNREFUSED
            self._end(orderly=False, refused=refused, detail=errno.errorcode.get(code, str(code)))
            return
        self._connecting = False
        self._listener.on_open()
        self._flush()

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(orderly=False, refused=False, detail=str(error))
            return
        if not data:
            self._end(orderly=True, refused=False, detail="closed by the peer")
            return
        if self._closing:
            return
        try:
            for payload in self._deframer.feed(data):
                if self._socket is None:
                    return
                self._listener.on_message(decode(payload))
        except RemoteProtocolError as error:
            self._end(orderly=False, refused=False, detail=str(error))

    def _flush(self) -> None:
        while self._outbox and self._socket is not None:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                break
            except OSError as error:
                self._outbox.clear()
                self._end(orderly=False, refused=False, detail=str(error))
                return
            del self._outbox[:sent]
        if self._socket is None:
            return
        if self._closing and not self._outbox:
            self.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted, self.on_ready)

    def _end(self, *, orderly: bool, refused: bool, detail: str) -> None:
        if self._socket is not None:
            self.close()
            self._listener.on_closed(orderly=orderly, refused=refused, detail=detail)


class Acceptor:
    """A listening socket that hands every connection to a callback.

    Owner: the thread that runs the selector.
    """

    def __init__(
        self, selector: selectors.BaseSelector, sock: socket.socket, accept: Callable[[socket.socket], None]
    ) -> None:
        """Take over a bound, listening socket."""
        self._selector = selector
        self._socket = sock
        self._accept = accept
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:  # noqa: ARG002  # the selector's callbacks share one signature
        """Accept what waits."""
        try:
            sock, _ = self._socket.accept()
        except OSError:  # the dialler has gone, or we are out of descriptors; the listener must survive both
            return
        self._accept(sock)

    def close(self) -> None:
        """Stop listening."""
        self._selector.unregister(self._socket)
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 picks one. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock
