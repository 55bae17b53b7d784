"""Observe: what a courier counted and measured, as frozen records and plain data for metrics and traces."""

import contextlib
import json
import logging
import os
import threading
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

from kvbaton.base.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """One ended handoff as one side saw it. Durations in seconds; 0 where a phase was not reached.

    Attributes:
        transfer_id: names the handoff.
        request_id: the local request, or "" where none was known.
        side: "producer" or "consumer".
        mode: "push" or "pull".
        outcome: "committed" or a FailureReason.
        tokens: of the prompt.
        blocks: blocks moved, all groups.
        bytes: posted by this side, or expected by it.
        descriptors: ranges posted by this side.
        transfers: posted by this side, or seen arriving.
        register_wait_s: consumer: until the producer could be told; producer: registration waiting for its prefill.
        match_s: producer: from both being known to the first post; consumer: from Register to the first arrival.
        post_s: spent planning and posting.
        wire_s: first post or arrival to last end.
        commit_s: from the last end to Received or Commit.
        tail_s: producer: from the end of the prefill to the last end.
        streamed_bytes: producer: posted before the prefill had ended.
        tail_transfers: producer: transfers that carried only some layers.
        checksums: consumer: compared and equal; one per block and region.
    """

    transfer_id: str
    request_id: str
    side: str
    mode: str
    outcome: str
    tokens: int
    blocks: int
    bytes: int
    descriptors: int
    transfers: int
    register_wait_s: float
    match_s: float
    post_s: float
    wire_s: float
    commit_s: float
    tail_s: float
    streamed_bytes: int
    tail_transfers: int
    checksums: int = 0


class Gauges(NamedTuple):
    """What is open on one rank now; names as in Observations."""

    quarantined_handoffs: int = 0
    open_consumers: int = 0
    open_producers: int = 0
    leases: int = 0


class Observations(TypedDict):
    """Plain data that crosses process borders with vLLM's stats.

    Attributes:
        handoffs: one list per ended handoff, columns as HANDOFF_COLUMNS.
        unexpected: count by "<event> in <state>" of peers' messages that fitted nothing.
        quarantined_handoffs: consumers whose blocks a silent peer may still write into, now.
        open_consumers: handoffs not ended on the consumer side, now.
        open_producers: handoffs not ended on the producer side, now.
        leases: prefills whose blocks are known here, now.
    """

    handoffs: list[list[str | float]]
    unexpected: dict[str, int]
    quarantined_handoffs: int
    open_consumers: int
    open_producers: int
    leases: int


HANDOFF_COLUMNS = (
    "side",
    "mode",
    "outcome",
    "bytes",
    "descriptors",
    "transfers",
    "register_wait_s",
    "match_s",
    "post_s",
    "wire_s",
    "commit_s",
    "tail_s",
    "streamed_bytes",
    "tail_transfers",
    "checksums",
)


class Observer:
    """Gathers records until they are taken; the oldest go where nobody takes them.

    Owner: courier, which replaces `gauges` as a whole.
    """

    def __init__(self, trace_file: Path | None) -> None:
        """Append records to `trace_file` too; it is opened at once, so that a bad path is found at start."""
        try:
            self._trace = trace_file.open("a", buffering=1, encoding="utf-8") if trace_file else None
        except OSError as error:
            raise ConfigError("trace_file", str(trace_file), f"a file we can append to ({error})") from error
        self._lock = threading.Lock()
        self._records: deque[HandoffRecord] = deque(maxlen=MAX_RECORDS)
        self._unexpected: Counter[str] = Counter()
        self.gauges = Gauges()
        self._reported: Gauges | None = None

    def record(self, record: HandoffRecord) -> None:
        """A handoff ended."""
        with self._lock:
            self._records.append(record)
        self._write(record)
        level = logging.DEBUG if record.outcome == "committed" else logging.WARNING
        _log.log(
            level,
            "handoff %s of %s as %s ended: %s (%d bytes, %d descriptors, %d transfers)",
            record.transfer_id,
            record.request_id,
            record.side,
            record.outcome,
            record.bytes,
            record.descriptors,
            record.transfers,
        )

    def _write(self, record: HandoffRecord) -> None:
        if self._trace is None:
            return
        try:
            # one write per line: several workers may share the file
            self._trace.write(json.dumps({**asdict(record), "pid": os.getpid()}) + "\n")
        except OSError:  # a full disk is no reason to stop moving KV
            _log.exception("the trace file cannot be written; tracing ends")
            self.close()

    def unexpected(self, what: str) -> None:
        """A peer's message fitted nothing."""
        with self._lock:
            self._unexpected[what] += 1
        _log.debug("unexpected: %s", what)

    @property
    def has_news(self) -> bool:
        """Whether anything is new since `take`; cheap, for every step. Callable from any thread."""
        return bool(self._records or self._unexpected) or self.gauges != self._reported

    def take(self) -> Observations:
        """What is new since the last call, and the gauges. Callable from any thread."""
        self._reported = gauges = self.gauges
        with self._lock:
            records = list(self._records)
            self._records.clear()
            unexpected, self._unexpected = self._unexpected, Counter()
        return Observations(
            handoffs=[[getattr(record, column) for column in HANDOFF_COLUMNS] for record in records],
            unexpected=dict(unexpected),
            quarantined_handoffs=gauges.quarantined_handoffs,
            open_consumers=gauges.open_consumers,
            open_producers=gauges.open_producers,
            leases=gauges.leases,
        )

    def close(self) -> None:
        """Close the trace."""
        trace, self._trace = self._trace, None
        if trace is not None:
            with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
                trace.close()
