"""The router's own pages: health, readiness, metrics, timelines, explanations."""

import msgspec

from kvbaton.policy.choose import Handoff, Refusal, decide
from kvbaton.policy.view import EngineView
from kvbaton.router.engines import Fleet
from kvbaton.router.exchange import Exchange
from kvbaton.router.http_errors import BadRequest, error_reply
from kvbaton.router.metrics import CONTENT_TYPE, Metrics
from kvbaton.router.openai import Endpoint, parse_body
from kvbaton.router.timeline import Report, TimelineStore

PREFIX = "/kvbaton/"
_PATHS = ("/health", "/ready", "/metrics")
_REQUESTS = "/kvbaton/requests"
_EXPLAIN = "/kvbaton/explain"


class Pages:
    """Serves what is about the router itself.

    Owner: the router's event loop.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics, timelines: TimelineStore, max_body_bytes: int) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._timelines = timelines
        self._max_body_bytes = max_body_bytes

    @staticmethod
    def owns(path: str) -> bool:
        """Whether `path` is one of these pages."""
        return path in _PATHS or path.startswith(PREFIX) or path == PREFIX.rstrip("/")

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        path = exchange.path
        if path == _EXPLAIN:
            await self._explain(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            await exchange.fail(error_reply(405, f"{path} answers GET only."))
        elif path == "/health":
            await _json(exchange, {"status": "up"})
        elif path == "/ready":
            await self._ready(exchange)
        elif path == "/metrics":
            await exchange.answer(200, self._metrics.render(), [("content-type", CONTENT_TYPE)])
        elif path == _REQUESTS:
            await _json(exchange, {"requests": [record.report() for record in self._timelines.recent()]})
        elif path.startswith(_REQUESTS + "/"):
            await self._timeline(exchange, path.removeprefix(_REQUESTS + "/"))
        else:
            await exchange.fail(error_reply(404, f"There is no page {path}."))

    async def _ready(self, exchange: Exchange) -> None:
        fleet = self._fleet.view()
        ready = fleet.has_complete_pair()
        report: Report = {
            "ready": ready,
            "prefill": [_engine(engine) for engine in fleet.prefill],
            "decode": [_engine(engine) for engine in fleet.decode],
        }
        await _json(exchange, report, 200 if ready else 503)

    async def _timeline(self, exchange: Exchange, any_id: str) -> None:
        record = self._timelines.find(any_id)
        if record is None:
            await exchange.fail(error_reply(404, "No such request is kept.", "unknown_request"))
        else:
            await _json(exchange, record.report())

    async def _explain(self, exchange: Exchange) -> None:
        """Say what would be done with a body now; nothing is sent and nothing booked."""
        if exchange.method != "POST":
            await exchange.fail(error_reply(405, f"{_EXPLAIN} answers POST only."))
            return
        try:
            endpoint = _asked_endpoint(exchange.target)
            body = parse_body(endpoint, await exchange.read_body(self._max_body_bytes))
        except BadRequest as error:
            await exchange.fail(error_reply(error.status, error.message))
            return
        fleet = self._fleet.view()
        decision = decide(fleet, body.shape)
        report: Report = {
            "endpoint": endpoint.value,
            "estimated_prompt_tokens": body.shape.prompt_tokens,
            "reason": decision.reason.value,
            "candidates": {
                "prefill": [_engine(engine) for engine in fleet.prefill],
                "decode": [_engine(engine) for engine in fleet.decode],
            },
        }
        if isinstance(decision, Handoff):
            report |= {
                "prefill": decision.prefill,
                "decode": decision.decode,
                "mode": decision.mode.value,
                "dispatch": decision.dispatch.value,
            }
        elif not isinstance(decision, Refusal):
            report |= {"decode": decision.decode, "mode": "local"}
        await _json(exchange, report)


def _asked_endpoint(target: str) -> Endpoint:
    query = target.partition("?")[2]
    asked = next(
        (p.removeprefix("path=") for p in query.split("&") if p.startswith("path=")), Endpoint.CHAT.value
    )
    try:
        return Endpoint(asked.replace("%2F", "/").replace("%2f", "/"))
    except ValueError:
        allowed = ", ".join(Endpoint)
        raise BadRequest(f"?path= names no endpoint that is handed off: {allowed}.") from None


def _engine(engine: EngineView) -> Report:
    return {
        "engine": engine.name,
        "up": engine.up,
        "running_requests": engine.running_requests,
        "queued_prompt_tokens": engine.queued_tokens,
        "producer": engine.identity.address.engine_id if engine.identity is not None else None,
    }


async def _json(exchange: Exchange, report: Report, status: int = 200) -> None:
    await exchange.answer(status, msgspec.json.encode(report), [("content-type", "application/json")])
