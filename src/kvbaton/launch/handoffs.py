"""One request's handoff as a row of a table, joined from the router's timeline and the engines' trace files.

Both sources are read leniently: what an engine or router does not report stays blank.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

BLANK: Final = "-"


@dataclass(frozen=True, slots=True)
class RouterTimeline:
    """What the router noted of a request's last attempt; moments in seconds since the request arrived."""

    request_id: str | None
    transfer_id: str | None
    mode: str | None
    reason: str | None
    failure: str | None
    num_attempts: int
    steps_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """What one worker noted of one handoff."""

    transfer_id: str | None
    request_id: str | None
    side: str | None
    outcome: str | None
    numbers: Mapping[str, float] = field(default_factory=dict)


def number(value: object) -> float | None:
    """Return a JSON number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def text(value: object) -> str | None:
    """Return a JSON string, or None for anything else."""
    return value if isinstance(value, str) else None


def numbers_in(value: object) -> dict[str, float]:
    """Return the members of a JSON object that are numbers."""
    if not isinstance(value, Mapping):
        return {}
    found = {str(key): number(item) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None}


def parse_timeline(body: str) -> RouterTimeline | None:
    """Read the router's answer for one request."""
    try:
        report = json.loads(body)
    except json.JSONDecodeError:
        return None
    attempts = report.get("attempts") if isinstance(report, dict) else None
    if not isinstance(attempts, list) or not attempts or not isinstance(attempts[-1], dict):
        return None
    last = attempts[-1]
    return RouterTimeline(
        request_id=text(last.get("request_id")),
        transfer_id=text(last.get("transfer_id")),
        mode=text(last.get("mode")),
        reason=text(last.get("reason")),
        failure=text(last.get("failure")),
        num_attempts=len(attempts),
        steps_s=numbers_in(last.get("steps_s")),
    )


def read_traces(paths: Iterable[Path]) -> list[TraceEntry]:
    """Read trace files; a missing file or an unfinished last line is skipped."""
    entries = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                entries.append(
                    TraceEntry(
                        text(record.get("transfer_id")),
                        text(record.get("request_id")),
                        text(record.get("side")),
                        text(record.get("outcome")),
                        numbers_in(record),
                    )
                )
    return entries


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """One line of the table."""

    label: str
    prompt_tokens: int | None
    output_tokens: int
    ttft_s: float | None
    timeline: RouterTimeline | None
    traces: Sequence[TraceEntry]

    @property
    def exposed_s(self) -> float | None:
        """Return what the user waited beyond prefill: first byte minus the end of the prefill leg."""
        if self.timeline is None:
            return None
        steps = self.timeline.steps_s
        if "decode_first_byte" not in steps or "prefill_done" not in steps:
            return None
        return steps["decode_first_byte"] - steps["prefill_done"]

    @property
    def tail_s(self) -> float | None:
        """Return how long bytes still moved after prefill had ended, on the slowest rank."""
        found = [
            entry.numbers["tail_s"]
            for entry in self.traces
            if entry.side == "producer" and "tail_s" in entry.numbers
        ]
        return max(found, default=None)

    def step_s(self, name: str) -> float | None:
        """Return a moment the router noted."""
        return None if self.timeline is None else self.timeline.steps_s.get(name)

    def traced(self, side: str, name: str) -> float | None:
        """Return the sum of a number over the workers of one side."""
        found = [entry.numbers[name] for entry in self.traces if entry.side == side and name in entry.numbers]
        return sum(found) if found else None

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, in the order of `HEADER`."""
        moved = first_of(self.traced("producer", "bytes"), self.traced("consumer", "bytes"))
        early = self.traced("producer", "streamed_bytes")
        share = early / moved if early is not None and moved else None
        transfers = first_of(self.traced("producer", "transfers"), self.traced("consumer", "transfers"))
        return (
            self.label,
            BLANK if self.timeline is None else self.timeline.failure or self.timeline.mode or BLANK,
            BLANK if self.prompt_tokens is None else str(self.prompt_tokens),
            str(self.output_tokens),
            milliseconds(self.ttft_s),
            milliseconds(self.step_s("prefill_done")),
            milliseconds(self.exposed_s),
            milliseconds(self.tail_s),
            BLANK if moved is None else f"{moved / 1e6:.1f}",
            BLANK if transfers is None else f"{transfers:.0f}",
            BLANK if share is None else f"{share:.0%}",
        )


HEADER: Final = (
    "request", "mode", "prompt", "output", "TTFT", "prefill", "exposed", "tail", "MB", "transfers", "early",
)  # fmt: skip
UNITS: Final = ("", "", "tokens", "tokens", "ms", "ms", "ms", "ms", "", "", "of MB")


def first_of(*values: float | None) -> float | None:
    """Return the first value that is there."""
    return next((value for value in values if value is not None), None)


def milliseconds(value_s: float | None) -> str:
    """Return seconds as whole milliseconds."""
    return BLANK if value_s is None else f"{value_s * 1e3:.0f}"


def join(timeline: RouterTimeline | None, traces: Iterable[TraceEntry]) -> tuple[TraceEntry, ...]:
    """Return the traces that belong to a timeline.

    vLLM lengthens a request's id (`chatcmpl-ID-SUFFIX`), so ours is looked for inside it.
    """
    if timeline is None:
        return ()
    ours = timeline.request_id
    return tuple(
        entry
        for entry in traces
        if (entry.transfer_id is not None and entry.transfer_id == timeline.transfer_id)
        or (ours is not None and entry.request_id is not None and ours in entry.request_id)
    )


def render_table(rows: Sequence[HandoffRow]) -> str:
    """Return the table as text, columns as wide as their widest cell."""
    lines = [HEADER, UNITS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    rendered = []
    for line in lines:
        first, *rest = (
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        rendered.append("  ".join([first, *rest]).rstrip())
    rendered.insert(2, "-" * max(len(line) for line in rendered))
    return "\n".join(rendered)
