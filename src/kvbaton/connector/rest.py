"""Rest: lets an engine's processes sleep while the engine only waits for KV, or for a long step on its own cores.

vLLM's processes talk over a queue in shared memory whose readers spin for a second after every message (`SpinCondition` in
`vllm.distributed.device_communicators.shm_broadcast`). That is right while an engine computes. An engine that only waits for KV, or only holds
blocks for somebody, steps all the time without computing, so one of its processes spins at any moment and takes a core from its neighbours. And
where the model computes on CPU cores, the scheduler's process spins on them while a prompt is computed.
docs/decisions/0011-rest.md has what was measured.
"""

import functools
import logging
import math
import time
from typing import Any, Final

_log = logging.getLogger(__name__)
_LONG_STEP_TOKENS: Final = 256
"""From here on a step on CPU cores lasts tens of milliseconds, beside which a late wake-up is nothing."""
_NAP_MS: Final = 2
"""The queue's wake-up is a ZeroMQ message that is lost now and then (a race in conflating pipes), so a reader also looks by itself."""


class Rest:
    """Whether this process's queue readers sleep now.

    Attributes:
        allowed: by the settings.
        shares_cores: the model computes on cores that these readers would spin on.
        resting: they sleep now.

    Owner: the thread that steps the engine in this process, which is also the one that reads the queue.
    """

    def __init__(self) -> None:
        """Spin, as vLLM has it."""
        self.allowed = False
        self.shares_cores = False
        self.resting = False

    def step(self, num_tokens: int) -> None:
        """A step begins that computes so many tokens; one of none is a wait for KV."""
        is_long = self.shares_cores and num_tokens >= _LONG_STEP_TOKENS
        self.resting = self.allowed and (num_tokens == 0 or is_long)


@functools.cache
def process_rest() -> Rest:
    """This process's, obeyed by its queue readers; a process belongs to one engine."""
    rest = Rest()
    let_rest(rest, _spin_condition())
    return rest


def let_rest(rest: Rest, condition: Any) -> bool:
    """Make this process's queue readers sleep at once while `rest` says so, instead of after a second of spinning.

    Args:
        rest: asked before each wait.
        condition: the class whose `wait` is wrapped: vLLM's `SpinCondition`, or None where there is none.
    Returns:
        False where vLLM has no such class, or another one than we know: then readers spin as vLLM has them.
    """
    if not _is_known(condition):
        _log.info("this vLLM's message queue is not known: its processes spin while they wait for KV")
        return False
    original = condition.wait

    @functools.wraps(original)
    def resting_wait(self: Any, timeout_ms: int | None = None) -> None:
        last_read = self.last_read
        if not rest.resting or time.monotonic() > last_read + self.busy_loop_s:
            original(self, timeout_ms)
            return
        self.last_read = -math.inf  # a read long ago is what vLLM's own idle mode goes by
        try:
            original(self, _NAP_MS if timeout_ms is None else min(timeout_ms, _NAP_MS))
        finally:
            self.last_read = last_read

    condition.wait = resting_wait
    return True


def _spin_condition() -> Any:
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return None
    return getattr(shm_broadcast, "SpinCondition", None)


def _is_known(condition: Any) -> bool:
    return hasattr(condition, "wait") and {"last_read", "busy_loop_s"} <= set(
        condition.__init__.__code__.co_names
    )
