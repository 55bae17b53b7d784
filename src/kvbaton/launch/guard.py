"""A small process that outlives the launcher just long enough to stop what it started.

A launcher that is killed outright cannot clean up. The guard reads a pipe whose writing end only the launcher holds;
the launcher tells it `+GROUP` and `-GROUP` as process groups come and go. When the pipe closes, for whatever reason,
the guard stops every group that is left.
"""

import contextlib
import signal
import subprocess
import sys
from typing import IO

from kvbaton.launch.groups import stop_groups


def read_groups(stream: IO[str]) -> set[int]:
    """Follow the launcher's messages until it is gone, and return the groups it left."""
    groups: set[int] = set()
    for line in stream:
        with contextlib.suppress(ValueError):
            if line.startswith("+"):
                groups.add(int(line[1:]))
            elif line.startswith("-"):
                groups.discard(int(line[1:]))
    return groups


class Guard:
    """The launcher's end of the pipe.

    Owner: the launcher. Lifetime: opened before the first process starts, closed after the last has ended.
    """

    def __init__(self, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbaton.launch.guard", str(grace_s)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Have a group stopped if we vanish."""
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave a group alone; it has ended, and its number may be used again."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Let the guard end; it stops what was not forgotten."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _send(self, message: str) -> None:
        if self._process.stdin is None or self._process.poll() is not None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(message)
            self._process.stdin.flush()


def main() -> int:
    """Guard until standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stop_groups(read_groups(sys.stdin), float(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
