"""Frame: how messages are cut out of a byte stream.

Eight bytes precede every message: magic "KVBT"[:2], wire version, zero, big-endian length. Junk is told from the first bytes.

Version history:
    1  first version
"""

import struct
from typing import Final

from kvbaton.base.errors import RemoteProtocolError

WIRE_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
MAX_GREETING_BYTES: Final = 64 * 1024

_MAGIC: Final = b"KV"
_HEADER: Final = struct.Struct(">2sBBI")
HEADER_BYTES: Final = _HEADER.size


def frame(payload: bytes) -> bytes:
    """Put a header before one encoded message."""
    return _HEADER.pack(_MAGIC, WIRE_VERSION, 0, len(payload)) + payload


class Deframer:
    """Cuts a byte stream into payloads.

    Owner: whoever reads the connection.
    """

    __slots__ = ("_buffer", "max_bytes")

    def __init__(self, max_bytes: int = MAX_GREETING_BYTES) -> None:
        """Accept payloads of at most `max_bytes`; raise the limit once the peer is known."""
        self._buffer = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the payloads they complete.

        Raises:
            RemoteProtocolError: not our protocol, another version, or too long; the connection cannot be used any more.
        """
        self._buffer += data
        payloads: list[bytes] = []
        while len(self._buffer) >= HEADER_BYTES:
            magic, version, _, length = _HEADER.unpack_from(self._buffer)
            if magic != _MAGIC:
                raise RemoteProtocolError("the bytes received are not kvbaton's side-channel protocol")
            if version != WIRE_VERSION:
                raise RemoteProtocolError(f"wire version {version} received, {WIRE_VERSION} is spoken here")
            if length > self.max_bytes:
                raise RemoteProtocolError(
                    f"a message of {length} bytes exceeds the limit of {self.max_bytes}"
                )
            if len(self._buffer) < HEADER_BYTES + length:
                break
            payloads.append(bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + length]))
            del self._buffer[: HEADER_BYTES + length]
        return payloads
