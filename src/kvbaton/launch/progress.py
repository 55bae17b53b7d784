"""Boot progress: one line per process that redraws itself on a terminal, plain lines anywhere else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from kvbaton.launch.supervisor import Child, State

MARK = {State.STARTING: "..", State.READY: "ok", State.ENDED: "!!"}


@dataclass(slots=True)
class Progress:
    """Draws what the supervisor reports. Owner: the launcher's main task."""

    stream: IO[str]
    clock: Callable[[], float]
    drawn_lines: int = 0
    last_text: str = ""

    def __call__(self, children: Sequence[Child]) -> None:
        """Draw the present state."""
        if self.stream.isatty():
            self._redraw([self._line(child) for child in children])
        else:
            self._append(children)

    def _line(self, child: Child) -> str:
        elapsed_s = self.clock() - child.started_s if child.ready_after_s is None else child.ready_after_s
        return f"  {MARK[child.state]} {child.spec.name:<10} {child.state:<8} {elapsed_s:5.1f} s  {child.spec.url}"

    def _redraw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self.drawn_lines}F" if self.drawn_lines else ""
        self.stream.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        self.stream.flush()
        self.drawn_lines = len(lines)

    def _append(self, children: Sequence[Child]) -> None:
        text = " ".join(f"{child.spec.name}={child.state}" for child in children)
        if text == self.last_text:
            return
        before, self.last_text = set(self.last_text.split(" ")), text
        for child in children:
            if f"{child.spec.name}={child.state}" not in before:
                self.stream.write(self._line(child) + "\n")
        self.stream.flush()
