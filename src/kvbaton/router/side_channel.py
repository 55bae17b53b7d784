"""Side channel: tells a producer engine that nobody will fetch a prefill, in the engines' own protocol."""

import asyncio

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.base.ids import HandoffKey, TransferId
from kvbaton.policy.view import ProducerIdentity
from kvbaton.runtime.greeting import DiallerGreeting
from kvbaton.wire.frame import HEADER_BYTES, MAX_GREETING_BYTES, Deframer, frame
from kvbaton.wire.messages import AnyMessage, Challenge, Lookup, Refused, Release, decode, encode
from kvbaton.wire.translate import key_to_wire


class SideChannelReleaser:
    """Says Release to an engine's directory, which passes it to every rank.

    A new connection for each: releases are rare, and an engine may have restarted since the last one.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        """Args: secret: the engines' shared secret (connector setting `secret`), or None."""
        self._secret = secret

    async def release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        """Release what `transfer_id` holds; a no-op for engines with upstream's connectors, which have no such message.

        Raises:
            OSError: the engine cannot be reached.
            RemoteProtocolError: it refuses us, or speaks something else.
        """
        if identity.only_mode is not None:
            return
        reader, writer = await asyncio.open_connection(identity.address.host, identity.address.port)
        try:
            greeting = DiallerGreeting(self._secret, Lookup)
            conversation = _Conversation(reader)
            writer.write(frame(encode(greeting.hello())))
            challenge = await conversation.next_message()
            if not isinstance(challenge, Challenge):
                raise RemoteProtocolError(f"{type(challenge).__name__} instead of a challenge")
            writer.write(frame(encode(greeting.answer(challenge))))
            answer = await conversation.next_message()
            if isinstance(answer, Refused):
                raise RemoteProtocolError(answer.detail)
            writer.write(frame(encode(Release(key_to_wire(HandoffKey(transfer_id))))))
            await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()


class _Conversation:
    """Messages read from a stream one at a time."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._deframer = Deframer(MAX_GREETING_BYTES)
        self._payloads: list[bytes] = []

    async def next_message(self) -> AnyMessage:
        while not self._payloads:
            data = await self._reader.read(HEADER_BYTES + MAX_GREETING_BYTES)
            if not data:
                raise RemoteProtocolError("the engine hung up")
            self._payloads = self._deframer.feed(data)
        return decode(self._payloads.pop(0))
