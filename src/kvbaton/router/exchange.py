"""One HTTP exchange with a client, as plain ASGI: body in, answer out, and word when the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvbaton.router.headers import ClientHeaders, HeaderList, encode, read_client_headers
from kvbaton.router.http_errors import BadRequest, ErrorReply, error_event
from kvbaton.router.patience import ClientGone

Message = MutableMapping[str, Any]  # ASGI's own shape; goes no further than this file and app.py
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """A client's request and the answer to it.

    Owner: the task the server runs for the request. Lifetime: `close` when the answer has ended.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        raw_path: bytes = scope.get("raw_path") or str(scope["path"]).encode("latin-1", "replace")
        query: bytes = scope.get("query_string", b"")
        self.path = raw_path.decode("latin-1").split("?", 1)[0]
        self.target = f"{self.path}?{query.decode('latin-1')}" if query else self.path
        self.headers: ClientHeaders = read_client_headers(scope["headers"])
        self.started = False
        self._event_stream = False
        self.extra_headers: HeaderList = []
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None
        if self.headers.client_request_id is not None:
            self.extra_headers.append(("x-client-request-id", self.headers.client_request_id))

    async def read_body(self, limit_bytes: int) -> bytes:
        """Read the whole request body.

        Raises:
            BadRequest: it is larger than `limit_bytes`.
            ClientGone: the client left while sending it.
        """
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            size_bytes += len(pieces[-1])
            if size_bytes > limit_bytes:
                raise BadRequest(f"The request body is larger than {limit_bytes} bytes.", status=413)
            if not message.get("more_body", False):
                return b"".join(pieces)

    @property
    def gone(self) -> asyncio.Task[None]:
        """Done when the client has left. Only after the body was read: there is one inbox for both."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._wait_gone())
        return self._gone

    async def _wait_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def close(self) -> None:
        """Stop listening for the client."""
        if self._gone is not None:
            self._gone.cancel()
            await asyncio.wait({self._gone})

    async def start(self, status: int, headers: HeaderList) -> None:
        """Send the head; nothing can be taken back afterwards."""
        self.started = True
        self._event_stream = any(
            n == "content-type" and v.startswith("text/event-stream") for n, v in headers
        )
        head = encode(headers + self.extra_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def piece(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client reads slower than the engine writes."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def break_off(self, status: int, message: str, code: str) -> None:
        """Tell the client that an answer it has begun to read will not be completed.

        In an event stream by a last event. Any other body is left incomplete, upon which the server closes the
        connection: the only way to say so once a length or a chunked body was promised.
        """
        if self._event_stream:
            await self.end(b"\n\n" + error_event(status, message, code))

    async def answer(self, status: int, body: bytes, headers: HeaderList) -> None:
        """Send a complete answer."""
        length = [] if status in (204, 304) else [("content-length", str(len(body)))]
        await self.start(status, headers + length)
        await self.end(b"" if self.method == "HEAD" else body)

    async def fail(self, reply: ErrorReply) -> None:
        """Send an error as a complete answer."""
        headers: HeaderList = [("content-type", reply.content_type)]
        if reply.retry_after_s is not None:
            headers.append(("retry-after", str(reply.retry_after_s)))
        await self.answer(reply.status, reply.body, headers)
