"""A client's generation request, from its body to the last byte of the answer."""

import asyncio
import secrets
from enum import StrEnum

from kvbaton.base.ids import RequestId, TransferId
from kvbaton.policy.choose import Decision, Handoff, Local, Refusal, decide
from kvbaton.policy.view import EngineName, RequestShape
from kvbaton.router.answer import deliver
from kvbaton.router.attempt import ClientRequest, HandoffAttempt, LocalAttempt, Services
from kvbaton.router.config import RouterConfig
from kvbaton.router.engines import Hold
from kvbaton.router.exchange import Exchange
from kvbaton.router.http_errors import BadRequest, error_reply
from kvbaton.router.legs import DecodeReady
from kvbaton.router.openai import AttemptIds, Endpoint, parse_body
from kvbaton.router.patience import ClientGone, DeadlinePassed, Patience
from kvbaton.router.timeline import AttemptTimeline, RequestTimeline, TimelineStore
from kvbaton.router.upstream import LegFailure, Retry

RETRY_AFTER_S = 1


class Outcome(StrEnum):
    """How a client's request ended; the label of the request counter, with the relay's own `StreamEnd`s."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    ENGINE_ERROR = "engine_error"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"  # the router is stopping
    INTERNAL_ERROR = "internal_error"


class Dispatcher:
    """Serves generation requests.

    Owner: the router's event loop; each call of `serve` runs in its request's task.
    """

    def __init__(self, config: RouterConfig, services: Services, timelines: TimelineStore) -> None:
        self._config = config
        self._services = services
        self._timelines = timelines

    async def serve(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Answer one request; every way out is counted once."""
        record = self._timelines.open(endpoint.value, exchange.headers.client_request_id)
        outcome: str = Outcome.INTERNAL_ERROR
        try:
            outcome = await self._serve(endpoint, exchange, record)
        except BadRequest as error:
            outcome = Outcome.CLIENT_ERROR
            await exchange.fail(error_reply(error.status, error.message))
        except ClientGone:
            outcome = Outcome.CLIENT_GONE
        except DeadlinePassed:
            outcome = Outcome.TIMEOUT
            message = f"No answer began within {self._config.request_timeout_s:g} s."
            await exchange.fail(error_reply(504, message, "request_timeout"))
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            last = record.attempts[-1] if record.attempts else None
            mode, reason = (last.mode, last.reason) if last is not None else ("none", "none")
            self._services.metrics.request_ended(mode, reason, outcome)
            record.finish(outcome)

    async def _serve(self, endpoint: Endpoint, exchange: Exchange, record: RequestTimeline) -> str:
        body = parse_body(endpoint, await exchange.read_body(self._config.max_body_bytes))
        request = ClientRequest(exchange.target, body, exchange.headers)
        patience = Patience(exchange.gone, self._config.request_timeout_s)
        avoid: frozenset[EngineName] = frozenset()
        failure: LegFailure | None = None
        for number in range(self._config.retries + 1):
            decision = self._decide(body.shape, avoid, failure)
            if isinstance(decision, Refusal):
                return await self._give_up(exchange, failure, decision)
            if number:
                self._services.metrics.retried()
            with self._services.fleet.hold(decision, body.shape.prompt_tokens) as hold:
                result = await self._attempt(exchange, request, decision, hold, patience, record)
            if isinstance(result, str):
                return result
            failure = result
            if failure.retry is Retry.NEVER:
                break
            avoid |= {failure.engine.name}
        return await self._give_up(exchange, failure, None)

    async def _attempt(
        self,
        exchange: Exchange,
        request: ClientRequest,
        decision: Handoff | Local,
        hold: Hold,
        patience: Patience,
        record: RequestTimeline,
    ) -> str | LegFailure:
        """Try once; returns how the answer ended, or why there is none."""
        timeline = self._open_attempt(record, decision)
        exchange.extra_headers = _own_headers(timeline, exchange.headers.client_request_id)
        attempt: HandoffAttempt | LocalAttempt
        if isinstance(decision, Handoff):
            attempt = HandoffAttempt(self._services, request, decision, timeline)
        else:
            attempt = LocalAttempt(self._services, request, decision, timeline)
        try:
            result = await attempt.run(hold, patience)
        except (ClientGone, DeadlinePassed) as end:
            timeline.failure = "client_gone" if isinstance(end, ClientGone) else "deadline"
            raise
        if isinstance(result, DecodeReady):
            ended = await deliver(exchange, result, attempt.cached_tokens, timeline, self._config)
            self._services.metrics.attempt_ended(timeline)
            return ended
        timeline.failure = f"{result.stage}_{result.kind}"
        self._services.metrics.attempt_failed(result.stage, result.kind)
        return result

    def _decide(
        self, shape: RequestShape, avoid: frozenset[EngineName], failure: LegFailure | None
    ) -> Decision:
        fleet = self._services.fleet.view()
        decision = decide(fleet, shape, avoid)
        if isinstance(decision, Refusal) and failure is not None and failure.retry is Retry.ANYWHERE:
            return decide(fleet, shape)
        return decision

    def _open_attempt(self, record: RequestTimeline, decision: Handoff | Local) -> AttemptTimeline:
        ids = AttemptIds(
            TransferId(f"xfer-{secrets.token_hex(16)}"), RequestId(f"kvb{secrets.token_hex(16)}")
        )
        handoff = decision if isinstance(decision, Handoff) else None
        timeline = AttemptTimeline(
            clock=record.clock,
            arrived_s=record.arrived_s,
            ids=ids,
            mode=handoff.mode.value if handoff else "local",
            reason=decision.reason.value,
            prefill=handoff.prefill if handoff else None,
            decode=decision.decode,
        )
        self._timelines.add_attempt(record, timeline)
        return timeline

    async def _give_up(self, exchange: Exchange, failure: LegFailure | None, refusal: Refusal | None) -> str:
        if failure is not None:
            await exchange.fail(failure.reply)
            return Outcome.CLIENT_ERROR if failure.reply.status < 500 else Outcome.ENGINE_ERROR
        reason = refusal.reason.value if refusal is not None else "no_attempt"
        message = "No complete pair of a prefill and a decode engine is ready; try again shortly."
        await exchange.fail(error_reply(503, message, reason, RETRY_AFTER_S))
        return Outcome.REFUSED


def _own_headers(timeline: AttemptTimeline, client_request_id: str | None) -> list[tuple[str, str]]:
    headers = [
        ("x-request-id", timeline.ids.request_id),
        ("x-kvbaton-decode", timeline.decode),
        ("x-kvbaton-mode", timeline.mode),
        ("x-kvbaton-reason", timeline.reason),
    ]
    if timeline.prefill is not None:
        headers.append(("x-kvbaton-prefill", timeline.prefill))
    if client_request_id is not None:
        headers.append(("x-client-request-id", client_request_id))
    return headers
