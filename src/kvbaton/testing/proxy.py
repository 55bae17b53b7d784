"""Proxy: a TCP middleman that resets, half-resets or silences the connections that run through it."""

import contextlib
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Pair:
    client: socket.socket
    server: socket.socket


class Proxy:
    """Forwards to one port.

    Owner: its own thread; the other methods may be called from any.
    """

    def __init__(self, port: int) -> None:
        """Args: port: on 127.0.0.1, where everything goes."""
        self._target = port
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._stalled = False
        self._stop = False
        self.num_accepted = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def reset(self, *, client: bool = True, server: bool = True) -> None:
        """Reset one or both sides of every connection; the side that is spared hears nothing more."""
        with self._lock:
            for pair in self._pairs:
                for sock, wanted in ((pair.client, client), (pair.server, server)):
                    if wanted and sock.fileno() >= 0:
                        self._selector.unregister(sock)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        sock.close()

    def stall(self) -> None:
        """Forward nothing and accept nobody until `resume`."""
        with self._lock:
            self._stalled = True

    def resume(self) -> None:
        """Undo `stall`."""
        with self._lock:
            self._stalled = False
        self._wake.send(b"x")

    def close(self) -> None:
        """Stop."""
        self._stop = True
        self._wake.send(b"x")
        self._thread.join(5)
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        for pair in self._pairs:
            pair.client.close()
            pair.server.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stop:
            ready = self._selector.select(1)
            with self._lock:
                if self._stalled:
                    threading.Event().wait(0.005)
                    continue
                for key, _ in ready:
                    self._serve(key.fileobj)

    def _serve(self, sock: object) -> None:
        if sock is self._woken:
            self._woken.recv(64)
        elif sock is self._listener:
            self._accept()
        else:
            for pair in self._pairs:
                if sock is pair.client:
                    self._pump(pair.client, pair.server)
                elif sock is pair.server:
                    self._pump(pair.server, pair.client)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self.num_accepted += 1
        self._pairs.append(_Pair(client, server))
        for sock in (client, server):
            self._selector.register(sock, selectors.EVENT_READ)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        if source.fileno() < 0:  # reset since it became readable
            return
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if data and sink.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if data:
                sink.sendall(data)
                return
            sink.shutdown(socket.SHUT_WR)
        self._selector.unregister(source)
        source.close()
