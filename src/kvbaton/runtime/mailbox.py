"""Mailbox: what engine threads and the courier leave for each other."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO

from kvbaton.base.ids import RequestId
from kvbaton.runtime.commands import Command, Results

Item = Command | Callable[[], None]


class Inbox:
    """Commands for the courier, and the means to wake it.

    Owner: any thread puts; the courier takes, and sleeps in its selector on `pipe`.
    """

    def __init__(self) -> None:
        """Start empty, with the courier awake."""
        self._items: deque[Item] = deque()
        # two thirds of what waking through a socket costs the thread that wakes
        pipe, wake = os.pipe()
        os.set_blocking(pipe, False)
        os.set_blocking(wake, False)
        self.pipe, self._wake = FileIO(pipe, "rb"), FileIO(wake, "wb")
        self._asleep = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Sequence[Item]) -> None:
        """Add work; a system call only where the courier sleeps and must be woken."""
        self._items.extend(items)
        self.rouse()

    def take(self) -> list[Item]:
        """Everything put so far."""
        return [self._items.popleft() for _ in range(len(self._items))]

    def fall_asleep(self) -> bool:
        """Say that the courier is about to sleep; False if something slipped in before that was said."""
        self._asleep = True
        if self._items:
            self._asleep = False
        return self._asleep

    def awake(self) -> None:
        """The courier is awake again and needs no signal."""
        self._asleep = False
        self.pipe.read(4096)

    def rouse(self) -> None:
        """Wake the courier if it sleeps."""
        if self._asleep:
            self._asleep = False
            try:
                self._wake.write(b"x")
            except (ValueError, OSError):  # closed, or being closed: the courier has stopped
                return

    def close(self) -> None:
        """Release the pipe."""
        self._wake.close()
        self.pipe.close()


class Outbox:
    """Results for the engine.

    Owner: the courier puts; any thread takes or waits.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._results = Results()
        self._lock = threading.Lock()
        self._ready = threading.Event()

    def sent(self, request_id: RequestId) -> None:
        """A prefill's blocks are no longer read."""
        with self._lock:
            self._results.sent.add(request_id)
            self._ready.set()

    def quarantined(self, request_id: RequestId, failure: str) -> None:
        """A request has failed, but its blocks may still be written; `received` follows."""
        with self._lock:
            self._results.quarantined[request_id] = failure
            self._ready.set()

    def received(self, request_id: RequestId, failure: str | None) -> None:
        """A request's blocks are no longer written; `failure` says why they must not be used."""
        with self._lock:
            self._results.received.add(request_id)
            if failure is not None:
                self._results.failed[request_id] = failure
            self._ready.set()

    def rouse(self) -> None:
        """End a wait, although there is nothing to take."""
        self._ready.set()

    def take(self) -> Results:
        """Everything put since the last call."""
        if not self._ready.is_set():
            return Results()
        with self._lock:
            results, self._results = self._results, Results()
            self._ready.clear()
        return results

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take, or `rouse` ends it."""
        return self._ready.wait(timeout_s)
