"""Which lines of a log tell why a process failed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbaton.base.errors import KvbatonError

TAIL_LINES: Final = 30
MAX_READ_BYTES: Final = 4_000_000
# An exception's own line, `SomeError: text`, or a program's `error: text`; the first one is the cause, later ones follow
# from it.
ERROR_LINE: Final = re.compile(
    r"(?:\b[A-Z][\w.]*(?:Error|Exception|Interrupt|Exit)\b: \S)|(?:^\S*:? ?error: \S)"
)
HARMLESS: Final = re.compile(r"\b(?:INFO|DEBUG|WARNING)\b|Warning:|\braise\b")


def root_error(lines: Iterable[str]) -> str | None:
    """Return the first line that looks like the error everything else follows from."""
    for line in lines:
        if ERROR_LINE.search(line) and not HARMLESS.search(line):
            return line.strip()
    return None


def read_log(path: Path) -> list[str]:
    """Return a log's lines, or none when it cannot be read; a huge log is read from its end."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - MAX_READ_BYTES))
            return stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What a user needs to see when a process did not come up."""

    name: str
    reason: str
    log_path: Path
    root: str | None
    tail: tuple[str, ...]

    def render(self) -> str:
        """Return the report as text."""
        parts = [f"{self.name} failed: {self.reason}"]
        if self.root is not None:
            parts.append(f"  likely cause: {self.root}")
        parts.append(f"  last lines of {self.log_path}:")
        parts += [f"  | {line}" for line in self.tail]
        return "\n".join(parts)


def report_failure(name: str, reason: str, log_path: Path) -> FailureReport:
    """Read a failed process's log into a report."""
    lines = read_log(log_path)
    return FailureReport(name, reason, log_path, root_error(lines), tuple(lines[-TAIL_LINES:]))


class ProcessFailed(KvbatonError):
    """A process of the deployment ended or did not become ready; carries the report to print."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(f"{report.name}: {report.reason}")
        self.report = report
