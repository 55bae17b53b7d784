"""Giving producers back what no decode leg will fetch, beside the requests that caused it."""

import asyncio
import logging

from kvbaton.base.ids import TransferId
from kvbaton.policy.view import ProducerIdentity
from kvbaton.router.metrics import Metrics
from kvbaton.router.release import Releaser

RELEASE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class Abandoned:
    """Runs releases in the background, so that no client waits for one.

    Owner: the router's event loop. Lifetime: closed with the app.
    """

    def __init__(self, releaser: Releaser, metrics: Metrics) -> None:
        self._releaser = releaser
        self._metrics = metrics
        self._running: set[asyncio.Task[None]] = set()

    def release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        """Start releasing one transfer."""
        task = asyncio.create_task(self._release(identity, transfer_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Wait for what is running; each release has its own time limit."""
        if self._running:
            await asyncio.wait(self._running)

    async def _release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._releaser.release(identity, transfer_id)
        except Exception as error:  # noqa: BLE001 - any releaser may be plugged in; the lease is the fallback
            self._metrics.released("failed")
            _log.warning("release at %s failed, its lease will end it: %s", identity.address, error)
        else:
            self._metrics.released("done")
