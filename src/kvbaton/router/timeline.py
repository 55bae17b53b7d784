"""When each step of a request happened, in seconds since it arrived."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvbaton.router.openai import AttemptIds

Clock = Callable[[], float]
Report = dict[str, "float | int | str | bool | Report | list[Report] | None"]
"""A timeline as JSON; built on its way out of the process only."""


class Step(StrEnum):
    """A moment worth knowing."""

    PREFILL_SENT = "prefill_sent"
    PREFILL_HEAD = "prefill_head"
    PREFILL_DONE = "prefill_done"
    DECODE_SENT = "decode_sent"
    DECODE_HEAD = "decode_head"
    FIRST_BYTE = "decode_first_byte"
    LAST_BYTE = "last_byte"


@dataclass(slots=True)
class AttemptTimeline:
    """The steps of one attempt.

    Owner: the task that serves the request.
    """

    clock: Clock
    arrived_s: float
    ids: AttemptIds
    mode: str
    reason: str
    prefill: str | None
    decode: str
    steps_s: dict[Step, float] = field(default_factory=dict)
    failure: str | None = None

    def mark(self, step: Step) -> None:
        """Note that `step` happened now; a repetition (a resent leg) moves it."""
        self.steps_s[step] = self.clock() - self.arrived_s

    def between_s(self, start: Step, end: Step) -> float | None:
        """Time from one step to another, if both happened."""
        if start in self.steps_s and end in self.steps_s:
            return self.steps_s[end] - self.steps_s[start]
        return None

    def report(self, *, finished: bool) -> Report:
        """As JSON; the transfer id, which is a right, is shown only once it is worth nothing."""
        steps: Report = {step.value: round(at_s, 6) for step, at_s in self.steps_s.items()}
        return {
            "request_id": self.ids.request_id,
            "transfer_id": self.ids.transfer_id if finished else None,
            "mode": self.mode,
            "reason": self.reason,
            "prefill": self.prefill,
            "decode": self.decode,
            "failure": self.failure,
            "steps_s": steps,
        }


@dataclass(slots=True)
class RequestTimeline:
    """One client request and its attempts."""

    key: int
    clock: Clock
    arrived_s: float
    endpoint: str
    client_request_id: str | None
    attempts: list[AttemptTimeline] = field(default_factory=list)
    outcome: str | None = None
    ended_s: float | None = None

    def finish(self, outcome: str) -> None:
        """Note how and when the request ended."""
        self.outcome = outcome
        self.ended_s = self.clock() - self.arrived_s

    def report(self) -> Report:
        """As JSON."""
        finished = self.outcome is not None
        return {
            "endpoint": self.endpoint,
            "client_request_id": self.client_request_id,
            "age_s": round(self.clock() - self.arrived_s, 6),
            "outcome": self.outcome,
            "ended_s": None if self.ended_s is None else round(self.ended_s, 6),
            "attempts": [attempt.report(finished=finished) for attempt in self.attempts],
        }


class TimelineStore:
    """The last requests, by any of their ids.

    Owner: the router's event loop.
    """

    def __init__(self, capacity: int, clock: Clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._records: OrderedDict[int, RequestTimeline] = OrderedDict()
        self._key_by_id: dict[str, int] = {}
        self._next_key = 0

    def open(self, endpoint: str, client_request_id: str | None) -> RequestTimeline:
        """Start a record; the oldest gives way."""
        record = RequestTimeline(self._next_key, self._clock, self._clock(), endpoint, client_request_id)
        self._records[self._next_key] = record
        if client_request_id is not None:
            self._key_by_id[client_request_id] = self._next_key
        self._next_key += 1
        while len(self._records) > self._capacity:
            self._evict()
        return record

    def add_attempt(self, record: RequestTimeline, attempt: AttemptTimeline) -> None:
        """Make `attempt` findable by its ids."""
        record.attempts.append(attempt)
        if record.key in self._records:
            self._key_by_id[attempt.ids.request_id] = record.key
            self._key_by_id[attempt.ids.transfer_id] = record.key

    def find(self, any_id: str) -> RequestTimeline | None:
        """Look a request up by request id, transfer id or the client's own id."""
        key = self._key_by_id.get(any_id)
        return None if key is None else self._records.get(key)

    def recent(self) -> list[RequestTimeline]:
        """All kept requests, newest first."""
        return list(reversed(self._records.values()))

    def _evict(self) -> None:
        key, record = self._records.popitem(last=False)
        ids = [record.client_request_id]
        for attempt in record.attempts:
            ids += [attempt.ids.request_id, attempt.ids.transfer_id]
        for any_id in ids:
            if any_id is not None and self._key_by_id.get(any_id) == key:
                del self._key_by_id[any_id]
