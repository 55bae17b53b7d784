"""Errors as an OpenAI client expects them: a status and `{"error": {...}}`."""

from dataclasses import dataclass

import msgspec

from kvbaton.base.errors import KvbatonError

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error answer, ours or an engine's own.

    Attributes:
        status: HTTP status.
        body: what the client gets.
        content_type: of the body.
        retry_after_s: when to come back; None if coming back will not help.
    """

    status: int
    body: bytes
    content_type: str = JSON
    retry_after_s: int | None = None


class BadRequest(KvbatonError):
    """A client's request cannot be understood.

    Attributes:
        status: HTTP status to answer with.
        message: what is wrong, for the client.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """Encode an error object."""
    error = {"message": message, "type": _kind(status), "param": None, "code": code or status}
    return msgspec.json.encode({"error": error})


def error_reply(
    status: int, message: str, code: str | None = None, retry_after_s: int | None = None
) -> ErrorReply:
    """Make an error answer of our own."""
    return ErrorReply(status, error_body(status, message, code), JSON, retry_after_s)


def error_event(status: int, message: str, code: str | None = None) -> bytes:
    """Encode an error as the last event of a stream that has begun."""
    return b"data: " + error_body(status, message, code) + b"\n\n"


def _kind(status: int) -> str:
    if status == 504:
        return "timeout_error"
    if status == 503:
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"
