"""A request may fail at once; its blocks may not be reused before nothing can write them."""

from connector.test_worker import RecordingCourier as FakeCourier
from connector.test_worker import start_receive
from kvbaton.base.ids import RequestId
from kvbaton.connector.fence import NoFence
from kvbaton.connector.metadata import BatonMetadata
from kvbaton.connector.quarantine import Quarantine, QuarantineNews
from kvbaton.connector.worker import BatonWorker
from kvbaton.runtime.commands import CancelReceive, Results

R = RequestId("r")


class Pool:
    """vLLM's block pool, as far as users of blocks are counted."""

    def __init__(self) -> None:
        self.blocks = list(range(10))
        self.users = [0] * 10

    def touch(self, blocks) -> None:
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            self.users[block] -= 1


def quarantine() -> tuple[Quarantine, Pool]:
    pool, found = Pool(), Quarantine()
    found.holder.bind(pool)
    found.watch(R, [3, 4])
    return found, pool


def worker(courier: FakeCourier, *, fails_early: bool = True) -> BatonWorker:
    return BatonWorker(
        courier, NoFence(courier.submit), wait_s=0.003, quiet_limit_s=10, fails_early=fails_early
    )


def test_blocks_are_held_from_the_first_rank_that_fails_early_to_the_last_fence() -> None:
    found, pool = quarantine()

    found.update(QuarantineNews(begun=(R,)).aggregate(QuarantineNews(begun=(R,))))
    found.settled(R)
    assert pool.users[3:5] == [1, 1]
    found.update(QuarantineNews(ended=(R,)))
    assert found.num_blocks == 2
    found.update(QuarantineNews(ended=(R,)))

    assert pool.users == [0] * 10
    assert found.num_blocks == 0


def test_blocks_of_a_fence_in_the_same_step_are_not_kept() -> None:
    found, pool = quarantine()

    found.update(QuarantineNews(begun=(R,), ended=(R,)))

    assert pool.users == [0] * 10


def test_worker_fails_a_quarantined_request_at_once_and_reports_its_fence_later() -> None:
    courier = FakeCourier()
    half = worker(courier)
    half.before_forward(start_receive())
    courier.results = Results(quarantined={R: "peer_silent"})

    report = half.take_report(may_wait=False)
    assert (report.received, report.failed) == ({R}, {R})
    assert half.take_news() == QuarantineNews(begun=(R,))

    half.before_forward(BatonMetadata(before=(CancelReceive(R),)))
    assert not any(isinstance(command, CancelReceive) for command in courier.told)
    courier.results = Results(received={R}, failed={R: "peer_silent"})
    report = half.take_report(may_wait=False)

    assert not report.received
    assert half.take_news() == QuarantineNews(ended=(R,))
    assert half.take_news() is None


def test_worker_of_an_engine_that_recomputes_waits_for_the_fence() -> None:
    courier = FakeCourier()
    half = worker(courier, fails_early=False)
    half.before_forward(start_receive())
    courier.results = Results(quarantined={R: "peer_silent"})

    assert not half.take_report(may_wait=False).received
    courier.results = Results(received={R}, failed={R: "peer_silent"})
    report = half.take_report(may_wait=False)

    assert (report.received, report.failed) == ({R}, {R})
    assert half.take_news() is None


def test_worker_told_of_quarantine_and_fence_together_reports_once() -> None:
    courier = FakeCourier()
    half = worker(courier)
    half.before_forward(start_receive())
    courier.results = Results(received={R}, failed={R: "x"}, quarantined={R: "x"})

    assert half.take_report(may_wait=False).failed == {R}
    assert half.take_news() is None
