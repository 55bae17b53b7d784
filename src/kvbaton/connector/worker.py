"""Worker half: hands commands to this rank's courier and its results to the engine.

It never waits for a transfer, with two exceptions: before a forward may overwrite preempted blocks, and for a few milliseconds in a
step that has nothing to compute.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvbaton.base.ids import RequestId
from kvbaton.connector.fence import ForwardFence
from kvbaton.connector.metadata import BatonMetadata
from kvbaton.connector.quarantine import QuarantineNews
from kvbaton.connector.tail import LayerTail
from kvbaton.runtime.commands import (
    CancelReceive,
    Command,
    DeclineTransfer,
    PrefillAborted,
    PrefillFinished,
    PrefillProgress,
    Results,
    StartReceive,
)

_log = logging.getLogger(__name__)

_QUIET_ROUND_S: Final = 5.0


class CourierPort(Protocol):
    """What the worker half needs of a courier."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand over commands, in order, without waiting."""
        ...

    def take_results(self) -> Results:
        """Everything new."""
        ...

    def wait_results(self, timeout_s: float) -> bool:
        """Wait until there is something new."""
        ...

    def wait_quiet(self, request_ids: Collection[RequestId], timeout_s: float) -> bool:
        """Wait until no transfer reads these prefills' blocks."""
        ...


@dataclass(slots=True)
class Report:
    """What one step tells the engine.

    Attributes:
        sent: held prefills whose blocks may be freed.
        received: requests that wait no longer.
        failed: those of `received` that have no usable KV.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class BatonWorker:
    """One rank's link between engine and courier.

    Owner: the worker's main thread.

    Invariant: a request id reaches the engine once in `sent` if it was held, once in `received` if it waited, and else never:
    vLLM's scheduler dies of unknown and of repeated ids.
    """

    def __init__(
        self,
        courier: CourierPort,
        fence: ForwardFence,
        wait_s: float,
        quiet_limit_s: float,
        tail: LayerTail | None = None,
        *,
        fails_early: bool = False,
    ) -> None:
        """Begin with nothing outstanding.

        Args:
            courier: of this rank.
            fence: orders what is said about forwards.
            wait_s: how long a step without a forward may wait for results.
            quiet_limit_s: how long preempted blocks may be read before the engine gives up.
            tail: sends last blocks layer by layer; None sends whole blocks.
            fails_early: report a failure while its blocks may still be written; the scheduler's half then holds them.
        """
        self._courier = courier
        self._fence = fence
        self._wait_s = wait_s
        self._quiet_limit_s = quiet_limit_s
        self._waiting: set[RequestId] = set()
        self._held: set[RequestId] = set()
        self._fails_early = fails_early
        self._quarantined: set[RequestId] = set()
        self._begun_quarantines: list[RequestId] = []
        self._ended_quarantines: list[RequestId] = []
        self._report = Report()
        self._begun: BatonMetadata | None = None
        self._after: tuple[PrefillProgress, ...] = ()
        self.tail = tail

    def before_forward(self, step: BatonMetadata) -> None:
        """Hand this step's commands over; the second call for the same step does nothing.

        Raises:
            RuntimeError: a transfer keeps reading blocks that the forward would overwrite.
        """
        if step is self._begun:
            return
        self._begun = step
        commands = [command for command in step.before if self._expects(command)]
        consumer = [c for c in commands if isinstance(c, StartReceive | CancelReceive | DeclineTransfer)]
        producer = [c for c in commands if not isinstance(c, StartReceive | CancelReceive | DeclineTransfer)]
        if producer:
            # Behind earlier forwards' frontiers, which may still wait for the device.
            self._fence.submit(producer)
        if step.preempted:
            self._fence.drain()
            self._wait_quiet(step.preempted)
        if consumer:
            self._courier.submit(consumer)
        if step.cached:
            # the device may still be running the forwards that computed them
            self._fence.submit_after_forward(step.cached)
        self._after = step.after
        if self.tail is not None and step.after:
            self.tail.begin(step.after)
        for refused in step.refused:
            _log.warning("request %s cannot receive its KV: %s", refused.request_id, refused.reason)
            self._report.received.add(refused.request_id)
            self._report.failed.add(refused.request_id)

    def after_forward(self, step: BatonMetadata) -> None:
        """The forward was launched; its frontiers hold once it has run."""
        after, self._after = self._after, ()
        if self.tail is not None and after:
            after = self.tail.end(after)
        if step is self._begun and after:
            self._fence.submit_after_forward(after)

    def take_report(self, *, may_wait: bool) -> Report:
        """What the engine must hear now.

        Args:
            may_wait: the step computed nothing, so a short wait costs less than stepping again.
        """
        self._collect()
        outstanding = self._waiting or self._held
        nothing_yet = not (self._report.sent or self._report.received)
        if may_wait and outstanding and nothing_yet and self._courier.wait_results(self._wait_s):
            self._collect()
        report, self._report = self._report, Report()
        return report

    def _expects(self, command: Command) -> bool:
        """Note what a command will be answered by; False for one that concerns nobody any more."""
        match command:
            case StartReceive():
                self._waiting.add(command.request_id)
            case CancelReceive():
                return command.request_id in self._waiting
            case PrefillFinished() | PrefillAborted(held=True):
                self._held.add(command.request_id)
            case _:
                pass
        return True

    def take_news(self) -> QuarantineNews | None:
        """What the scheduler's half must hear of blocks in quarantine, in the step whose report named their requests."""
        if not self._begun_quarantines and not self._ended_quarantines:
            return None
        news = QuarantineNews(tuple(self._begun_quarantines), tuple(self._ended_quarantines))
        self._begun_quarantines, self._ended_quarantines = [], []
        return news

    def _quarantine(self, request_id: RequestId, reason: str) -> None:
        if not self._fails_early or request_id not in self._waiting:
            return
        self._waiting.discard(request_id)
        self._quarantined.add(request_id)
        self._begun_quarantines.append(request_id)
        self._report.received.add(request_id)
        self._report.failed.add(request_id)
        _log.warning(
            "request %s failed (%s); its blocks stay unused until nothing can write them", request_id, reason
        )

    def _collect(self) -> None:
        results = self._courier.take_results()
        for request_id, reason in results.quarantined.items():
            if request_id not in results.received:
                self._quarantine(request_id, reason)
        for request_id in results.received:
            if request_id in self._quarantined:
                self._quarantined.discard(request_id)
                self._ended_quarantines.append(request_id)
                continue
            if request_id not in self._waiting:
                _log.error("the courier reported %s as received, which does not wait", request_id)
                continue
            self._waiting.discard(request_id)
            self._report.received.add(request_id)
            if request_id in results.failed:
                _log.warning("request %s did not receive its KV: %s", request_id, results.failed[request_id])
                self._report.failed.add(request_id)
        for request_id in results.sent:
            if request_id not in self._held:
                _log.error("the courier reported %s as sent, which is not held", request_id)
                continue
            self._held.discard(request_id)
            self._report.sent.add(request_id)

    def _wait_quiet(self, request_ids: Sequence[RequestId]) -> None:
        waited_s = 0.0
        while not self._courier.wait_quiet(request_ids, min(_QUIET_ROUND_S, self._quiet_limit_s)):
            waited_s += _QUIET_ROUND_S
            _log.warning(
                "for %.0f s transfers have been reading preempted blocks of %s", waited_s, request_ids
            )
            if waited_s >= self._quiet_limit_s:
                # Going on would send another request's KV under this one's name.
                raise RuntimeError(
                    f"transfers still read preempted blocks of {request_ids} after {waited_s:.0f} s"
                )
