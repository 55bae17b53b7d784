"""Requests that are not handed off, passed on to a decode engine as they are."""

import asyncio

import aiohttp

from kvbaton.policy.choose import choose_decode
from kvbaton.router.attempt import Services
from kvbaton.router.config import RouterConfig
from kvbaton.router.engines import Engine
from kvbaton.router.exchange import Exchange
from kvbaton.router.headers import response_headers
from kvbaton.router.http_errors import BadRequest, error_reply
from kvbaton.router.legs import DecodeReady
from kvbaton.router.openai import strip_forbidden
from kvbaton.router.patience import ClientGone, DeadlinePassed, Patience
from kvbaton.router.relay import relay_stream
from kvbaton.router.upstream import ConnectionFailed, FailureKind

_RETRY_AFTER_S = 1


class PassThrough:
    """Passes requests on.

    Owner: the router's event loop; each call of `serve` runs in its request's task.
    """

    def __init__(self, config: RouterConfig, services: Services) -> None:
        self._config = config
        self._services = services

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request; nothing is retried, since it is not known what repeating it would do."""
        outcome = "internal_error"
        try:
            outcome = await self._serve(exchange)
        except BadRequest as error:
            outcome = "client_error"
            await exchange.fail(error_reply(error.status, error.message))
        except ClientGone:
            outcome = "client_gone"
        except DeadlinePassed:
            outcome = "timeout"
            message = f"No answer began within {self._config.request_timeout_s:g} s."
            await exchange.fail(error_reply(504, message, "request_timeout"))
        finally:
            self._services.metrics.request_ended("pass", "other_path", outcome)

    async def _serve(self, exchange: Exchange) -> str:
        body = strip_forbidden(await exchange.read_body(self._config.max_body_bytes))
        if not exchange.target.startswith("/"):
            raise BadRequest("The request target is not a path.")
        patience = Patience(exchange.gone, self._config.request_timeout_s)
        fleet = self._services.fleet
        name = choose_decode(fleet.view())
        if name is None:
            await exchange.fail(
                error_reply(503, "No decode engine is ready.", "no_decode_engine", _RETRY_AFTER_S)
            )
            return "refused"
        engine = fleet.engines[name]
        exchange.extra_headers.append(("x-kvbaton-decode", name))
        with fleet.hold_decode(name):
            try:
                response = await self._head(engine, exchange, body, patience)
            except ConnectionFailed as error:
                if error.kind is FailureKind.CONNECT:
                    engine.lost()
                await exchange.fail(
                    error_reply(502, "The decode engine cannot be reached.", f"decode_{error.kind}")
                )
                return "engine_error"
            try:
                return await self._relay(exchange, response)
            finally:
                response.close()

    async def _head(
        self, engine: Engine, exchange: Exchange, body: bytes, patience: Patience
    ) -> aiohttp.ClientResponse:
        headers = exchange.headers.for_passing_on(self._services.api_key)
        sending = asyncio.create_task(
            self._services.upstream.send(engine, exchange.method, exchange.target, headers, body or None)
        )
        try:
            await patience.wait_any({sending})
        except BaseException:
            sending.cancel()
            await asyncio.wait({sending})
            if not sending.cancelled() and sending.exception() is None:
                sending.result().close()
            raise
        return sending.result()

    async def _relay(self, exchange: Exchange, response: aiohttp.ClientResponse) -> str:
        headers = response_headers(response.headers.items())
        length = response.headers.get("content-length")
        if length is not None:
            headers.append(("content-length", length))
        await exchange.start(response.status, headers)
        if exchange.method == "HEAD" or response.status in (204, 304):
            await exchange.end()
            return "ok"
        ready = DecodeReady(response, b"", streamed=True)
        return await relay_stream(exchange, b"", ready.rest(), self._config.idle_timeout_s)
