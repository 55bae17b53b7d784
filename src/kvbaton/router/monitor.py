"""Watching engines: up or down, and who they are, so that no request has to find out."""

import asyncio
import logging

from kvbaton.policy.view import Role
from kvbaton.router.abandoned import Abandoned
from kvbaton.router.config import RouterConfig
from kvbaton.router.engines import Engine, Fleet
from kvbaton.router.headers import ClientHeaders
from kvbaton.router.identity import IdentityUnknown, Learnt, learn_identity
from kvbaton.router.metrics import Metrics
from kvbaton.router.upstream import ConnectionFailed, Upstream, read_all

PROBE_TIMEOUT_S = 120.0
"""The first request an engine ever serves may compile kernels for a minute."""

SILENT_CHECKS = 3
"""So many unanswered checks in a row take an engine out; a busy one may well miss one or two."""

_log = logging.getLogger(__name__)


class Monitor:
    """One watching task per engine.

    Owner: the router's event loop. Lifetime: started and closed with the app.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, upstream: Upstream, metrics: Metrics, abandoned: Abandoned
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._abandoned = abandoned
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()

    def start(self) -> None:
        """Begin watching all engines."""
        self._tasks = [asyncio.create_task(self._watch(engine)) for engine in self._fleet.engines.values()]

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def wait_settled(self) -> None:
        """Wait until every engine is up and every producer known."""
        async with self._changed:
            await self._changed.wait_for(self._is_settled)

    def _is_settled(self) -> bool:
        engines = self._fleet.engines.values()
        return all(e.up and (e.role is Role.DECODE or e.identity is not None) for e in engines)

    async def _watch(self, engine: Engine) -> None:
        backoff_s = self._config.backoff_s
        while True:
            engine.check_wanted.clear()
            try:
                settled = await self._check(engine)
            except Exception:  # noqa: BLE001 - the owner loop of an engine: without it nobody would ever look again
                _log.exception("checking %r failed", engine)
                settled = False
            async with self._changed:
                self._changed.notify_all()
            if settled:
                backoff_s = self._config.backoff_s
                await _wait_set(engine.check_wanted, self._config.health_interval_s)
            else:
                # Requests that fail meanwhile must not hurry this along, or a dead engine is hammered.
                await _wait_set(asyncio.Event(), backoff_s)
                backoff_s = min(2 * backoff_s, self._config.max_backoff_s)

    async def _check(self, engine: Engine) -> bool:
        """Check one engine once; returns whether nothing is left to find out about it."""
        if not await self._is_healthy(engine):
            if engine.up:
                _log.warning("%s engine %s is down", engine.role, engine.name)
            engine.up = False
            engine.identity = None
            return False
        if not engine.up:
            _log.info("%s engine %s is up", engine.role, engine.name)
        engine.up = True
        return engine.role is Role.DECODE or engine.identity is not None or await self._identify(engine)

    async def _is_healthy(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(self._config.check_timeout_s):
                healthy = await self._ask_health(engine)
        except TimeoutError:
            engine.silent_checks += 1
            _log.warning("%s engine %s did not answer a health check", engine.role, engine.name)
            return engine.up and engine.silent_checks < SILENT_CHECKS
        except ConnectionFailed as error:
            _log.debug("%r: %s", engine, error)
            healthy = False
        engine.silent_checks = 0
        return healthy

    async def _ask_health(self, engine: Engine) -> bool:
        headers = ClientHeaders((), None).for_passing_on(self._config.api_key)
        response = await self._upstream.send(engine, "GET", "/health", headers, None)
        try:
            await read_all(response)
        finally:
            response.close()
        return response.status == 200

    async def _identify(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                learnt = await learn_identity(
                    self._upstream, engine, self._config.connector, self._config.api_key
                )
        except (IdentityUnknown, ConnectionFailed, TimeoutError) as error:
            _log.warning(
                "prefill engine %s is not identified, its legs run in series: %s", engine.name, error
            )
            return False
        self._accept(engine, learnt)
        return True

    def _accept(self, engine: Engine, learnt: Learnt) -> None:
        identity = learnt.producers[0]
        engine.learnt(identity)
        engine.several_producers = len(learnt.producers) > 1
        self._metrics.identity_learnt(learnt.source)
        _log.info("prefill engine %s is producer %s (%s)", engine.name, identity, learnt.source)
        if learnt.transfer_id is not None:
            self._abandoned.release(identity, learnt.transfer_id)


async def _wait_set(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
