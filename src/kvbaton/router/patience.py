"""What can end a wait besides its object: the client leaving, and the deadline."""

import asyncio
from collections.abc import Iterable
from typing import Any

Gone = asyncio.Task[None]


class ClientGone(Exception):
    """The client closed its connection."""


class DeadlinePassed(Exception):
    """The answer did not begin in time."""


class Patience:
    """One client's presence and one deadline.

    Owner: the task that serves the request.
    """

    def __init__(self, gone: Gone, timeout_s: float) -> None:
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + timeout_s

    def check(self) -> None:
        """Raise if it is over already.

        Raises:
            ClientGone, DeadlinePassed.
        """
        if self._gone.done():
            raise ClientGone
        if self._loop.time() >= self._deadline_s:
            raise DeadlinePassed

    async def wait_any(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Wait until one of `tasks` is done; what it came to is not looked at.

        Raises:
            ClientGone, DeadlinePassed.
        """
        left_s = self._deadline_s - self._loop.time()
        done, _ = await asyncio.wait(
            {*tasks, self._gone}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED
        )
        if self._gone in done:
            raise ClientGone
        if not done:
            raise DeadlinePassed
