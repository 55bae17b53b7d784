"""A hand on the side channel that says whatever a test wants."""

import socket
from typing import Self

from kvbaton.runtime.greeting import DiallerGreeting
from kvbaton.wire.frame import Deframer, frame
from kvbaton.wire.messages import AnyMessage, Challenge, Identity, Introduce, Lookup, decode, encode

TIMEOUT_S = 10.0


class Raw:
    """One plain connection."""

    def __init__(self, port: int, secret: bytes | None = None) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._deframer = Deframer(64 << 20)
        self._pending: list[bytes] = []
        self._secret = secret

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, message: AnyMessage) -> None:
        self.sock.sendall(frame(encode(message)))

    def read(self) -> AnyMessage:
        while not self._pending:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._pending += self._deframer.feed(data)
        return decode(self._pending.pop(0))

    def read_until_closed(self) -> list[AnyMessage]:
        messages = []
        try:
            while True:
                messages.append(self.read())
        except (EOFError, ConnectionError):
            return messages

    def greet(self, identity: Identity | None = None) -> AnyMessage:
        """Hello, Challenge, then Introduce or Lookup; returns the answer to an Introduce."""
        greeting = DiallerGreeting(
            self._secret, Lookup if identity is None else lambda proof: Introduce(identity, proof)
        )
        self.send(greeting.hello())
        challenge = self.read()
        assert isinstance(challenge, Challenge)
        self.send(greeting.answer(challenge))
        return challenge if identity is None else self.read()
