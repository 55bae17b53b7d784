"""Progress: one line that says what runs, how much is done and how long the rest takes."""

import time
from typing import IO, Final

WIDTH: Final = 28


class Progress:
    """Shows a bar on a terminal, plain lines elsewhere.

    Owner: the benchmark's main thread.
    """

    def __init__(self, out: IO[str], total_s: float) -> None:
        self._out = out
        self._total_s = max(total_s, 1.0)
        self._done_s = 0.0
        self._started_s = time.monotonic()
        self._tty = out.isatty()

    def show(self, what: str) -> None:
        """Say what is done now."""
        share = min(self._done_s / self._total_s, 1.0)
        spent_s = time.monotonic() - self._started_s
        # The plan's own pace, corrected by how it went so far.
        pace = spent_s / self._done_s if self._done_s else 1.0
        left = duration((self._total_s - self._done_s) * pace)
        bar = "#" * round(share * WIDTH)
        line = f"[{bar:<{WIDTH}}] {share:4.0%}  {left} left  {what}"
        self._out.write(f"\r\x1b[K{line[:120]}" if self._tty else f"{line}\n")
        self._out.flush()

    def advance(self, planned_s: float) -> None:
        """Count work that was planned to take this long as done."""
        self._done_s += planned_s

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._out.write(f"\r\x1b[K{text}\n" if self._tty else f"{text}\n")
        self._out.flush()


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{max(seconds, 0):.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
