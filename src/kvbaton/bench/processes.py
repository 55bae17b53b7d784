"""Processes of a benchmark: started in groups of their own, watched, measured, and stopped whatever happens.

Should this process be killed outright, the launcher's guard, started by its command line, stops the groups that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from kvbaton.base.errors import KvbatonError
from kvbaton.bench.engines import Spec

GRACE_S: Final = 10.0
POLL_S: Final = 0.1
LOG_TAIL_BYTES: Final = 3000


class ProcessEnded(KvbatonError):
    """A process that a contender needs is gone; carries the end of its log."""

    def __init__(self, name: str, reason: str, log_path: Path) -> None:
        super().__init__(f"{name}: {reason}; its log ({log_path}) ends:\n{log_tail(log_path)}")
        self.name = name
        self.reason = reason


class Processes:
    """All processes of one contender.

    Owner: the benchmark's main thread. Lifetime: `with`; leaving stops every group.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[Spec, subprocess.Popen[bytes]]] = {}
        self._guard: subprocess.Popen[str] | None = None
        self._pause = threading.Event()

    def __enter__(self) -> Self:
        """Start the guard."""
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "kvbaton.launch.guard", str(GRACE_S)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        self.stop()

    def start(self, spec: Spec, *, piped: bool = False) -> subprocess.Popen[bytes]:
        """Start a process with its output, or with `piped` only its errors, in its log."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=dict(spec.environment),
                start_new_session=True,
            )
        self._running[spec.name] = (spec, process)
        self._tell_guard(f"+{process.pid}")
        return process

    def check_alive(self) -> None:
        """See that nothing has ended.

        Raises:
            ProcessEnded: something has.
        """
        for spec, process in self._running.values():
            if process.poll() is not None:
                raise ProcessEnded(spec.name, f"ended with status {process.returncode}", spec.log_path)

    def pause(self) -> None:
        """Wait a moment between two looks."""
        self._pause.wait(POLL_S)

    def cpu_s(self) -> Mapping[str, float]:
        """CPU seconds used so far, by process, everything in its group counted."""
        by_group = cpu_s_by_group()
        return {name: by_group.get(process.pid, 0.0) for name, (_, process) in self._running.items()}

    def stop(self) -> None:
        """Ask every group to end, wait, kill what does not."""
        groups = {process.pid for _, process in self._running.values()}
        for group in groups:
            signal_group(group, signal.SIGTERM)
        end_s = time.monotonic() + GRACE_S
        while groups & cpu_s_by_group().keys() and time.monotonic() < end_s:
            for _, process in self._running.values():
                process.poll()
            self.pause()
        for group in groups & cpu_s_by_group().keys():
            signal_group(group, signal.SIGKILL)
        for _, process in self._running.values():
            process.wait()
            for stream in (process.stdin, process.stdout):
                close_quietly(stream)
            self._tell_guard(f"-{process.pid}")
        self._running.clear()
        if self._guard is not None:
            close_quietly(self._guard.stdin)
            self._guard.wait()
            self._guard = None

    def _tell_guard(self, message: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(message + "\n")
                self._guard.stdin.flush()


def close_quietly(stream: IO[bytes] | IO[str] | None) -> None:
    """Close a pipe whose other end may be gone."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal every member of a group; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def cpu_s_by_group(proc: Path = Path("/proc")) -> dict[int, float]:
    """CPU seconds of every process group that has a live member."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The second field is the command in parentheses and may itself contain any character.
        fields = text.rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            continue
        group = int(fields[2])
        # user and system time, of the process and of its children that have ended
        found[group] = found.get(group, 0.0) + sum(int(value) for value in fields[11:15]) / ticks_per_s
    return found


def log_tail(path: Path, limit_bytes: int = LOG_TAIL_BYTES) -> str:
    """The last lines of a log."""
    try:
        data = path.read_bytes()
    except OSError:
        return "(no log)"
    return data[-limit_bytes:].decode(errors="replace")


def run_quietly(argv: Sequence[str]) -> str:
    """Run a short helper program and return what it printed.

    Raises:
        KvbatonError: it failed; carries its own words.
    """
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KvbatonError(done.stderr.strip() or f"`{' '.join(argv)}` ended with status {done.returncode}")
    return done.stdout.strip()
