"""Beginning: what the first events of a streamed answer say about whether it will be one."""

import re
from typing import Final

import msgspec

from kvbaton.router.http_errors import ErrorReply, error_reply

_LIMIT_BYTES: Final = 1 << 16  # a beginning longer than this is an answer
_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")
_OPENING_EVENTS: Final = frozenset({b"response.created", b"response.in_progress", b"response.queued"})


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_Choice]


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None


class _ErrorObject(msgspec.Struct):
    error: _ErrorCode


_chat_chunk = msgspec.json.Decoder(_ChatChunk)
_error_object = msgspec.json.Decoder(_ErrorObject)


class Beginning:
    """Collects a stream's first pieces until they tell an answer from a failure.

    vLLM opens a chat stream with a chunk that only names the role, and a Responses stream with the response's state, also where the
    next event is the error of a failed KV load. Until something else comes, the attempt can still be made elsewhere.

    Owner: a decode leg. Lifetime: until `decided`.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.received = b""
        self.decided = False
        self.error: ErrorReply | None = None
        self._seen_bytes = 0

    def feed(self, piece: bytes) -> None:
        """Add what came next."""
        self.received += piece
        while not self.decided:
            end = _BLANK_LINE.search(self.received, self._seen_bytes)
            if end is None:
                self.decided = len(self.received) > _LIMIT_BYTES
                return
            event = self.received[self._seen_bytes : end.start()]
            self._seen_bytes = end.end()
            self._judge(event)

    def _judge(self, event: bytes) -> None:
        name, data = b"", b""
        for line in event.splitlines():
            if line.startswith(b"event:"):
                name = line.removeprefix(b"event:").strip()
            elif line.startswith(b"data:"):
                data += line.removeprefix(b"data:").strip()
        self.error = _error(name, data)
        self.decided = self.error is not None or not (name in _OPENING_EVENTS or _names_only_role(data))


def _names_only_role(data: bytes) -> bool:
    try:
        choices = _chat_chunk.decode(data).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(choices) and not any(
        each.delta.content or each.finish_reason or each.token_ids for each in choices
    )


def _error(name: bytes, data: bytes) -> ErrorReply | None:
    """The error an event carries, if it does."""
    try:
        code = _error_object.decode(data).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if name != b"error" and not data.replace(b" ", b"").startswith(b'{"error":'):
            return None
        return error_reply(500, "The decode engine began its answer with an error.", "decode_error_event")
    return ErrorReply(code if isinstance(code, int) and 400 <= code < 600 else 500, data)
