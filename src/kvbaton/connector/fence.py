"""Fence: keeps what is said about a forward from reaching the courier before the device has run it.

A CPU forward has run when it returns. A CUDA forward has only been launched, so an event is recorded behind it and a thread waits for
that event; the engine's thread never does, except to drain the fence before preempted blocks are overwritten.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvbaton.runtime.commands import Command

_log = logging.getLogger(__name__)


class DeviceEvent(Protocol):
    """A point in a device's stream of work."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class ForwardFence(Protocol):
    """Order of frontiers and of all that is said about prefills."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand over behind everything given so far."""
        ...

    def submit_after_forward(self, commands: Sequence[Command]) -> None:
        """Hand over once the forward launched last has run."""
        ...

    def drain(self) -> None:
        """Wait until everything given so far was handed over."""
        ...

    def close(self) -> None:
        """Give up; idempotent."""
        ...


class NoFence:
    """For devices whose forward has run when it returns."""

    def __init__(self, hand_over: Callable[[Sequence[Command]], None]) -> None:
        """Hand everything over at once."""
        self.submit = hand_over
        self.submit_after_forward = hand_over

    def drain(self) -> None:
        """Nothing is ever kept."""

    def close(self) -> None:
        """Nothing to give up."""


class EventFence:
    """For devices that run behind the host.

    Owner: the worker's main thread, which alone may call it; its own thread hands over.
    """

    def __init__(
        self, hand_over: Callable[[Sequence[Command]], None], record: Callable[[], DeviceEvent]
    ) -> None:
        """Start the thread.

        Args:
            hand_over: the courier's `submit`.
            record: marks the current end of the device's work.
        """
        self._hand_over = hand_over
        self._record = record
        self._queue: queue.Queue[tuple[DeviceEvent | None, Sequence[Command]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kvbaton-fence", daemon=True)
        self._thread.start()

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand over behind everything given so far."""
        self._queue.put((None, commands))

    def submit_after_forward(self, commands: Sequence[Command]) -> None:
        """Hand over once the device has done what it was given so far."""
        self._queue.put((self._record(), commands))

    def drain(self) -> None:
        """Wait until everything given so far was handed over."""
        self._queue.join()

    def close(self) -> None:
        """Stop the thread."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, commands = item
            try:
                if event is not None:
                    event.synchronize()
                self._hand_over(commands)
            except Exception:  # noqa: BLE001  # without its frontiers a handoff ends by its deadline; without this thread all would
                _log.exception("frontiers of a forward were lost")
            finally:
                self._queue.task_done()
        self._queue.task_done()
