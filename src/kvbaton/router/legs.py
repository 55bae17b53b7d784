"""The two upstream requests of an attempt, each from sending to a result or a failure."""

from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass

import aiohttp

from kvbaton.router.beginning import Beginning
from kvbaton.router.engines import Engine
from kvbaton.router.headers import HeaderList
from kvbaton.router.http_errors import error_reply
from kvbaton.router.params import NoParams, PrefillAnswer, read_answer
from kvbaton.router.timeline import AttemptTimeline, Step
from kvbaton.router.upstream import (
    ConnectionFailed,
    FailureKind,
    LegFailure,
    Retry,
    Stage,
    Upstream,
    connection_failure,
    read_all,
    status_failure,
)

_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class LegRequest:
    """What one leg sends.

    Attributes:
        engine: where to.
        path: endpoint, with its query.
        headers: complete.
        body: encoded.
    """

    engine: Engine
    path: str
    headers: HeaderList
    body: bytes


@dataclass(slots=True)
class DecodeReady:
    """A decode leg whose answer has begun well.

    Attributes:
        response: open if streamed.
        first: the beginning of a stream, or the whole of a plain answer.
        streamed: whether more may follow.
    Lifetime: whoever holds it must `close` it.
    """

    response: aiohttp.ClientResponse
    first: bytes
    streamed: bool

    async def rest(self) -> AsyncIterator[bytes]:
        """The pieces after the first, as they arrive.

        Raises:
            ConnectionFailed: the stream broke off.
        """
        try:
            async for piece in self.response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionFailed(FailureKind.RESET, str(error) or type(error).__name__) from None

    def close(self) -> None:
        """Close; if the answer is not complete, the connection goes too and the engine aborts the request."""
        self.response.close()


async def prefill_leg(
    upstream: Upstream, request: LegRequest, timeline: AttemptTimeline
) -> PrefillAnswer | LegFailure:
    """Run a prefill leg to its end."""
    engine = request.engine
    timeline.mark(Step.PREFILL_SENT)
    try:
        response = await upstream.send(engine, "POST", request.path, request.headers, request.body)
        with closing(response):
            timeline.mark(Step.PREFILL_HEAD)
            body = await read_all(response)
    except ConnectionFailed as error:
        return connection_failure(Stage.PREFILL, engine, error)
    if not 200 <= response.status < 300:
        return status_failure(Stage.PREFILL, engine, response, body)
    timeline.mark(Step.PREFILL_DONE)
    try:
        return read_answer(body)
    except NoParams as error:
        reply = error_reply(
            502, f"Prefill engine {engine.name} handed nothing over: {error}", "no_kv_transfer_params"
        )
        return LegFailure(Stage.PREFILL, FailureKind.NO_PARAMS, engine, reply, Retry.NEVER)


async def decode_leg(
    upstream: Upstream, request: LegRequest, timeline: AttemptTimeline
) -> DecodeReady | LegFailure:
    """Run a decode leg until its answer can be shown to the client: a stream's first piece, or all of a plain answer."""
    engine = request.engine
    timeline.mark(Step.DECODE_SENT)
    try:
        response = await upstream.send(engine, "POST", request.path, request.headers, request.body)
    except ConnectionFailed as error:
        return connection_failure(Stage.DECODE, engine, error)
    ready: DecodeReady | None = None
    try:
        timeline.mark(Step.DECODE_HEAD)
        if not 200 <= response.status < 300:
            return status_failure(Stage.DECODE, engine, response, await read_all(response))
        if response.content_type != _EVENT_STREAM:
            ready = DecodeReady(response, await read_all(response), streamed=False)
        else:
            beginning = await _beginning(response)
            failed = beginning.error
            if failed is not None:
                retry = Retry.NEVER if failed.status < 500 else Retry.ANYWHERE
                return LegFailure(Stage.DECODE, FailureKind.ERROR_EVENT, engine, failed, retry)
            # Only of a stream: a plain answer's first byte tells when all tokens were there.
            timeline.mark(Step.FIRST_BYTE)
            ready = DecodeReady(response, beginning.received, streamed=True)
        return ready
    except ConnectionFailed as error:
        return connection_failure(Stage.DECODE, engine, error)
    finally:
        if ready is None:
            response.close()


async def _beginning(response: aiohttp.ClientResponse) -> Beginning:
    beginning = Beginning()
    try:
        while not beginning.decided:
            piece = await response.content.readany()
            if not piece:
                break
            beginning.feed(piece)
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionFailed(FailureKind.RESET, str(error) or type(error).__name__) from None
    if not beginning.received:
        raise ConnectionFailed(FailureKind.RESET, "the stream ended before its first event")
    return beginning
