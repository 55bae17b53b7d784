"""The ASGI application: which path goes where, and what lives as long as the process."""

import asyncio
import logging
import time

from kvbaton.router.abandoned import Abandoned
from kvbaton.router.attempt import Services
from kvbaton.router.config import RouterConfig
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.engines import Fleet
from kvbaton.router.exchange import Exchange, Receive, Scope, Send
from kvbaton.router.http_errors import error_reply
from kvbaton.router.metrics import Metrics
from kvbaton.router.monitor import Monitor
from kvbaton.router.openai import Endpoint
from kvbaton.router.pages import Pages
from kvbaton.router.passing import PassThrough
from kvbaton.router.patience import ClientGone
from kvbaton.router.release import LeaseOnly, Releaser
from kvbaton.router.timeline import TimelineStore
from kvbaton.router.upstream import Upstream

_log = logging.getLogger(__name__)
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class RouterApp:
    """One router, as a plain ASGI callable.

    Owner: the server's event loop. Lifetime: the ASGI lifespan opens and closes all it holds.
    """

    def __init__(self, config: RouterConfig, releaser: Releaser | None = None) -> None:
        self.config = config
        self.fleet = Fleet(config.prefill, config.decode, config.mode)
        self.metrics = Metrics(self.fleet)
        self._abandoned = Abandoned(releaser or LeaseOnly(), self.metrics)
        self._running: _Running | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        match scope["type"]:
            case "lifespan":
                await self._lifespan(receive, send)
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})

    async def wait_settled(self) -> None:
        """Wait until every engine is up and every producer known."""
        await self._parts().monitor.wait_settled()

    def _parts(self) -> "_Running":
        if self._running is None:
            raise RuntimeError("the app serves only within its ASGI lifespan")
        return self._running

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        self._running = _Running(self.config, self.fleet, self.metrics, self._abandoned)
        self._running.monitor.start()
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()  # lifespan.shutdown
        finally:
            await self._running.close()
            self._running = None
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except asyncio.CancelledError:
            if exchange.started:
                raise
            await exchange.fail(error_reply(503, "The router is stopping.", "stopping"))
            raise
        except ClientGone:
            return
        except Exception:  # noqa: BLE001 - the owner loop of a request: whatever happens, the client is told
            _log.exception("%s %s failed", exchange.method, exchange.path)
            message = "The router failed to serve this request."
            if exchange.started:
                await exchange.break_off(500, message, "router_error")
            else:
                await exchange.fail(error_reply(500, message, "router_error"))
        finally:
            await exchange.close()

    async def _route(self, exchange: Exchange) -> None:
        parts = self._parts()
        endpoint = _ENDPOINTS.get(exchange.path)
        if endpoint is not None and exchange.method == "POST":
            await parts.dispatcher.serve(endpoint, exchange)
        elif parts.pages.owns(exchange.path):
            await parts.pages.serve(exchange)
        else:
            await parts.passing.serve(exchange)


class _Running:
    """What exists only while the event loop runs."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: Metrics, abandoned: Abandoned) -> None:
        self.upstream = Upstream(config)
        self.abandoned = abandoned
        self.monitor = Monitor(config, fleet, self.upstream, metrics, abandoned)
        # not the loop's clock: uvloop's stands still for a millisecond, and steps are shorter
        timelines = TimelineStore(config.kept_timelines, time.monotonic)
        services = Services(self.upstream, fleet, metrics, abandoned, config.api_key)
        self.dispatcher = Dispatcher(config, services, timelines)
        self.passing = PassThrough(config, services)
        self.pages = Pages(fleet, metrics, timelines, config.max_body_bytes)

    async def close(self) -> None:
        await self.monitor.close()
        await self.abandoned.close()
        await self.upstream.close()
