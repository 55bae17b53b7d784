import pytest

from connector.stand_ins import CONSUME, PRODUCE, request, scheduler, step
from kvbaton.base.ids import HandoffKey, RequestId, TransferId
from kvbaton.connector.fence import NoFence
from kvbaton.connector.metadata import BatonMetadata, Refused
from kvbaton.connector.worker import BatonWorker
from kvbaton.runtime.commands import (
    CancelReceive,
    PrefillAborted,
    PrefillFinished,
    PrefillPreempted,
    PrefillProgress,
    PrefillStarted,
    Results,
)

R = RequestId("r")


class RecordingCourier:
    """Writes down what it is told and answers what the test put in."""

    def __init__(self) -> None:
        self.told = []
        self.results = Results()
        self.late = Results()
        self.waits = []
        self.quiet = [True]
        self.asked_quiet = []

    def submit(self, commands, *, wake: bool = True) -> None:
        self.told.extend(commands)

    def take_results(self) -> Results:
        results, self.results = self.results, Results()
        return results

    def wait_results(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self.results, self.late = self.late, Results()
        return bool(self.results.sent or self.results.received)

    def wait_quiet(self, request_ids, timeout_s: float) -> bool:
        self.asked_quiet.append((tuple(request_ids), len(self.told)))
        return self.quiet.pop(0)


@pytest.fixture
def courier() -> RecordingCourier:
    return RecordingCourier()


@pytest.fixture
def worker(courier: RecordingCourier) -> BatonWorker:
    return BatonWorker(courier, NoFence(courier.submit), wait_s=0.003, quiet_limit_s=10)


def start_receive() -> BatonMetadata:
    half, entry = scheduler(), request(params=CONSUME)
    half.on_new_request(entry)
    half.allocated(entry, [[1, 2, 3]], 9)
    return half.build(step())


def test_worker_hands_a_step_over_once_though_two_hooks_see_it(worker, courier):
    metadata = start_receive()
    worker.before_forward(metadata)
    worker.before_forward(metadata)

    assert courier.told == list(metadata.before)


def test_worker_reports_frontiers_after_the_forward_only(worker, courier):
    progress = PrefillProgress(R, 4, False, ())
    metadata = BatonMetadata(after=(progress,), num_tokens=1)
    worker.before_forward(metadata)

    assert courier.told == []
    worker.after_forward(metadata)
    assert courier.told == [progress]


def test_worker_reports_a_cached_prefix_before_the_forward_and_behind_the_prefills_start(worker, courier):
    started = PrefillStarted(R, HandoffKey(TransferId("t")), 9, b"")
    prefix, rest = PrefillProgress(R, 4, False, ()), PrefillProgress(R, 9, True, ())
    worker.before_forward(BatonMetadata(before=(started,), cached=(prefix,), after=(rest,), num_tokens=5))

    assert courier.told == [started, prefix]


def test_worker_reports_a_received_request_once(worker, courier):
    worker.before_forward(start_receive())
    courier.results = Results(received={R})

    assert worker.take_report(may_wait=False).received == {R}
    courier.results = Results(received={R})
    assert worker.take_report(may_wait=False).received == set()


def test_worker_reports_a_failed_request_as_received_too(worker, courier):
    worker.before_forward(start_receive())
    courier.results = Results(received={R}, failed={R: "the producer is gone"})

    report = worker.take_report(may_wait=False)

    assert (report.received, report.failed) == ({R}, {R})


def test_worker_never_reports_an_id_nobody_waits_for(worker, courier):
    courier.results = Results(received={R}, sent={R})

    report = worker.take_report(may_wait=False)

    assert (report.received, report.sent) == (set(), set())


@pytest.mark.parametrize(
    "command", [PrefillFinished(R), PrefillAborted(R, HandoffKey(TransferId("t")), held=True)]
)
def test_worker_reports_a_held_prefill_as_sent_once(worker, courier, command):
    worker.before_forward(BatonMetadata(before=(command,)))
    courier.results = Results(sent={R})

    assert worker.take_report(may_wait=False).sent == {R}
    courier.results = Results(sent={R})
    assert worker.take_report(may_wait=False).sent == set()


def test_worker_keeps_a_cancel_for_a_request_that_was_reported_to_itself(worker, courier):
    worker.before_forward(start_receive())
    courier.results = Results(received={R}, failed={R: "deadline"})
    worker.take_report(may_wait=False)
    worker.before_forward(BatonMetadata(before=(CancelReceive(R),)))

    assert CancelReceive(R) not in courier.told


def test_worker_passes_a_cancel_on_while_the_request_waits(worker, courier):
    worker.before_forward(start_receive())
    worker.before_forward(BatonMetadata(before=(CancelReceive(R),)))

    assert courier.told[-1] == CancelReceive(R)


def test_worker_fails_a_refused_request_in_the_same_step(worker):
    worker.before_forward(BatonMetadata(refused=(Refused(R, "nonsense"),)))

    report = worker.take_report(may_wait=False)

    assert (report.received, report.failed) == ({R}, {R})
    assert worker.take_report(may_wait=False).received == set()


def test_worker_waits_briefly_in_a_step_without_work(worker, courier):
    worker.before_forward(start_receive())
    courier.late = Results(received={R})

    assert worker.take_report(may_wait=True).received == {R}
    assert courier.waits == [0.003]


@pytest.mark.parametrize("may_wait", [True, False])
def test_worker_with_nothing_outstanding_never_waits(worker, courier, may_wait):
    worker.take_report(may_wait=may_wait)

    assert courier.waits == []


def test_worker_lets_no_forward_overwrite_blocks_that_are_read(worker, courier):
    courier.quiet = [False, True]
    preempted = PrefillPreempted(R)
    worker.before_forward(BatonMetadata(preempted=(R,), before=(preempted, *start_receive().before)))

    assert courier.asked_quiet == [((R,), 1), ((R,), 1)]
    assert courier.told[0] == preempted
    assert len(courier.told) == 2


def test_worker_gives_up_rather_than_send_another_requests_blocks(worker, courier):
    courier.quiet = [False, False, False]

    with pytest.raises(RuntimeError, match="preempted blocks"):
        worker.before_forward(BatonMetadata(preempted=(R,), before=(PrefillPreempted(R),)))


def test_worker_with_a_producer_finished_in_one_step_keeps_order(worker, courier):
    half, entry = scheduler(), request(params=PRODUCE)
    half.on_new_request(entry)
    metadata = half.build(step(new={"r": [[1, 2, 3]]}, tokens={"r": 10}))
    worker.before_forward(metadata)
    worker.after_forward(metadata)
    worker.before_forward(BatonMetadata(before=(PrefillFinished(R),)))

    assert [type(command).__name__ for command in courier.told] == [
        "PrefillStarted",
        "PrefillProgress",
        "PrefillFinished",
    ]
