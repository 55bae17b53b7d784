"""Start processes, wait until they serve, notice when one ends, stop them all.

One asyncio task tree owns everything. Every process leads its own group and session, so a Ctrl-C in the terminal
reaches only the launcher, and stopping a group also stops what the process itself started.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

import aiohttp

from kvbaton.launch.failure import ProcessFailed, report_failure
from kvbaton.launch.groups import group_runs, signal_group
from kvbaton.launch.guard import Guard
from kvbaton.launch.specs import ProcessSpec

POLL_S: Final = 0.25
PROBE_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
STOP_GRACE_S: Final = 15.0
KILL_WAIT_S: Final = 5.0


class State(StrEnum):
    """How far a process has come."""

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(slots=True)
class Child:
    """One running process and its state. Owner: the supervisor."""

    spec: ProcessSpec
    process: asyncio.subprocess.Process
    started_s: float
    state: State = State.STARTING
    ready_after_s: float | None = None

    @property
    def group(self) -> int:
        """Return the process group, which its leader's id names."""
        return self.process.pid


class Supervisor:
    """All processes of a deployment.

    Owner: the launcher's main task. Lifetime: `async with`; leaving it stops everything, however it is left.
    """

    def __init__(self, on_change: Callable[[Sequence[Child]], None], grace_s: float = STOP_GRACE_S) -> None:
        self._on_change = on_change
        self._children: list[Child] = []
        self._guard = Guard(grace_s)
        self._grace_s = grace_s
        self._first_end: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Enter with nothing started."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        await asyncio.shield(self.stop())

    @property
    def children(self) -> tuple[Child, ...]:
        """Return the processes in the order they were started."""
        return tuple(self._children)

    async def start(self, spec: ProcessSpec) -> Child:
        """Start a process with its output going to its log."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.environment),
                start_new_session=True,
            )
        self._guard.watch(process.pid)
        child = Child(spec, process, asyncio.get_running_loop().time())
        self._children.append(child)
        self._watches.append(asyncio.create_task(self._watch_end(child)))
        self._on_change(self.children)
        return child

    async def wait_ready(self, children: Sequence[Child], timeout_s: float) -> None:
        """Wait until all of these serve.

        Raises:
            ProcessFailed: one ended, or was not ready in time; carries which and its log.
        """
        async with aiohttp.ClientSession(timeout=PROBE_TIMEOUT) as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for child in children:
                        tasks.create_task(self._wait_one_ready(session, child, timeout_s))
            except* ProcessFailed as failures:
                # One failing stops the others, so the first is the one to tell.
                raise failures.exceptions[0] from None

    async def wait_any_end(self) -> ProcessFailed:
        """Wait until any process ends, which none should, and return what to report."""
        return self._ended(await asyncio.shield(self._first_end))

    async def stop(self) -> None:
        """Ask every group to end, wait, and kill what does not."""
        loop = asyncio.get_running_loop()
        for watch in self._watches:
            watch.cancel()
        for child in self._children:
            signal_group(child.group, signal.SIGTERM)
        end_s = loop.time() + self._grace_s
        # A group may hold processes that are not our children, and those cannot be awaited.
        while self._running() and loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        for child in self._running():
            signal_group(child.group, signal.SIGKILL)
        for child in self._children:
            await asyncio.wait_for(child.process.wait(), KILL_WAIT_S)
            child.state = State.ENDED
            self._guard.forget(child.group)
        self._children.clear()
        self._guard.close()

    async def _watch_end(self, child: Child) -> None:
        await child.process.wait()
        if not self._first_end.done():
            self._first_end.set_result(child)

    def _running(self) -> list[Child]:
        return [child for child in self._children if group_runs(child.group)]

    async def _wait_one_ready(self, session: aiohttp.ClientSession, child: Child, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        while not await answers(session, child.spec.health_url):
            if child.process.returncode is not None:
                raise self._ended(child)
            if loop.time() - child.started_s > timeout_s:
                reason = f"not ready after {timeout_s:.0f} s"
                raise ProcessFailed(report_failure(child.spec.name, reason, child.spec.log_path))
            self._on_change(self.children)
            await asyncio.sleep(POLL_S)
        child.state = State.READY
        child.ready_after_s = loop.time() - child.started_s
        self._on_change(self.children)

    def _ended(self, child: Child) -> ProcessFailed:
        child.state = State.ENDED
        self._on_change(self.children)
        reason = describe_exit(child.process.returncode)
        return ProcessFailed(report_failure(child.spec.name, reason, child.spec.log_path))


def describe_exit(returncode: int | None) -> str:
    """Say in words how a process ended."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Say whether a health address answers 200; anything else counts as not yet."""
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def launcher_environment() -> dict[str, str]:
    """Return the environment children are derived from; this is the only place it is read."""
    return dict(os.environ)
