"""The one HTTP client of a router process, and what can go wrong with it."""

from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Protocol

import aiohttp
from yarl import URL

from kvbaton.router.config import RouterConfig
from kvbaton.router.engines import Engine
from kvbaton.router.headers import HeaderList
from kvbaton.router.http_errors import ErrorReply, error_reply


class Stage(StrEnum):
    """Which leg failed."""

    PREFILL = "prefill"
    DECODE = "decode"


class FailureKind(StrEnum):
    """How a leg failed."""

    CONNECT = "connect"  # no connection could be opened
    RESET = "reset"  # the connection broke before the answer was complete
    STATUS = "status"  # the engine answered with an error
    NO_PARAMS = "no_params"  # prefill succeeded but says not where its KV is
    ERROR_EVENT = "error_event"  # 200, then an error instead of a first token


class Retry(StrEnum):
    """Whether a failed attempt may be repeated."""

    NEVER = "never"
    ELSEWHERE = "elsewhere"  # only where the failing engine is not involved
    ANYWHERE = "anywhere"  # elsewhere if possible, else on the same engines


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that did not come to a good end.

    Attributes:
        stage: which leg.
        kind: how it failed.
        engine: where.
        reply: what the client gets if nobody does better.
        retry: whether another attempt makes sense.
    """

    stage: Stage
    kind: FailureKind
    engine: Engine
    reply: ErrorReply
    retry: Retry


class ConnectionFailed(Exception):
    """An engine could not be reached, or broke off.

    Attributes:
        kind: CONNECT or RESET.
    """

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _RequestTrace(Protocol):
    reused: bool


class Upstream:
    """The shared client session.

    Owner: the router's event loop. Lifetime: opened and closed with the app.
    """

    def __init__(self, config: RouterConfig) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            # No total limit: it would cut long streams. The router keeps its own deadlines.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(
        self, engine: Engine, method: str, path: str, headers: HeaderList, body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of the answer.

        A kept-alive connection that turns out to be closed says nothing about the engine, so one is forgiven.
        The caller closes the response; being cancelled closes the connection, which aborts the engine's request.

        Raises:
            ConnectionFailed: no answer came.
        """
        url = URL(f"{engine.name}{path}", encoded=True)
        reused = False
        for last_try in (False, True):
            trace = SimpleNamespace(reused=False)
            try:
                return await self._session.request(
                    method, url, headers=headers, data=body, allow_redirects=False, trace_request_ctx=trace
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise ConnectionFailed(FailureKind.CONNECT, str(error) or "timed out") from None
            except (aiohttp.ClientError, OSError) as error:
                reused = trace.reused
                if last_try or not reused:
                    raise ConnectionFailed(FailureKind.RESET, str(error) or type(error).__name__) from None
        raise AssertionError("unreachable")


async def read_all(response: aiohttp.ClientResponse) -> bytes:
    """Read a response to its end.

    Raises:
        ConnectionFailed: it broke off.
    """
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionFailed(FailureKind.RESET, str(error) or type(error).__name__) from None


def connection_failure(stage: Stage, engine: Engine, error: ConnectionFailed) -> LegFailure:
    """A failed connection as the end of a leg; the engine is checked again before it is trusted again."""
    if error.kind is FailureKind.CONNECT:
        engine.lost()
        message, retry = f"The {stage} engine cannot be reached.", Retry.ELSEWHERE
    else:
        engine.suspect()
        message, retry = f"The {stage} engine closed the connection before answering.", Retry.ANYWHERE
    return LegFailure(stage, error.kind, engine, error_reply(502, message, f"{stage}_{error.kind}"), retry)


def status_failure(stage: Stage, engine: Engine, response: aiohttp.ClientResponse, body: bytes) -> LegFailure:
    """An error answer as the end of a leg, kept as the engine wrote it."""
    status = response.status
    content_type = response.headers.get("content-type", "application/json")
    retry_after = response.headers.get("retry-after", "")
    reply = ErrorReply(status, body, content_type, int(retry_after) if retry_after.isdigit() else None)
    if status < 400:  # a redirect or the like: nothing to relay
        reply = error_reply(502, f"The {stage} engine answered with status {status}.", f"{stage}_status")
    return LegFailure(stage, FailureKind.STATUS, engine, reply, _retry_for(stage, status))


def _retry_for(stage: Stage, status: int) -> Retry:
    if 400 <= status < 500:
        return Retry.NEVER
    # A decode engine answers 500 when a transfer failed; another try on the same pair may well succeed.
    return Retry.ANYWHERE if stage is Stage.DECODE and status == 500 else Retry.ELSEWHERE


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    trace: _RequestTrace = context.trace_request_ctx
    trace.reused = True
