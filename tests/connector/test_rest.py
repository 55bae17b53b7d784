"""Rest against vLLM's own message queue: a resting reader sleeps, and still gets every message."""

import inspect
import threading
import time

import pytest
from vllm.distributed.device_communicators import shm_broadcast as shm

from kvbaton.connector.rest import Rest, let_rest


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's class as vLLM has it, whatever this process has wrapped; given back as it was."""
    monkeypatch.setattr(shm.SpinCondition, "wait", inspect.unwrap(shm.SpinCondition.wait))
    return shm.SpinCondition


@pytest.fixture
def queue(condition: type):
    """A queue between two threads, as vLLM has it between two processes."""
    writer = shm.MessageQueue(n_reader=1, n_local_reader=1)
    handle = writer.export_handle()
    reader = shm.MessageQueue.create_from_handle(handle, rank=0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    return writer, reader


def read_late(queue, messages: int) -> float:
    """CPU seconds of a reader per second of waiting for `messages` that come every 20 ms."""
    writer, reader = queue
    pace = threading.Event()

    def write() -> None:
        for n in range(messages):
            pace.wait(0.02)
            writer.enqueue(n)

    writing = threading.Thread(target=write)
    writing.start()
    began, cpu = time.monotonic(), time.thread_time()
    got = [reader.dequeue(timeout=10) for _ in range(messages)]
    share = (time.thread_time() - cpu) / (time.monotonic() - began)
    writing.join()
    assert got == list(range(messages))
    return share


def test_a_resting_reader_sleeps_between_messages_and_gets_them_all(condition, queue):
    rest = Rest()
    rest.allowed = True
    assert let_rest(rest, condition)
    rest.step(1)
    read_late(queue, 2)
    spinning = read_late(queue, 20)
    rest.step(0)

    resting = read_late(queue, 20)

    assert resting < spinning / 2


def test_a_resting_reader_is_late_by_a_nap_at_most_when_its_wake_up_is_lost(condition, queue, monkeypatch):
    writer, reader = queue
    rest = Rest()
    rest.allowed = True
    let_rest(rest, condition)
    rest.step(0)
    monkeypatch.setattr(condition, "notify", lambda self: None)
    writer.enqueue("first")
    reader.dequeue(timeout=10)
    late = threading.Timer(0.05, writer.enqueue, ["second"])
    late.start()

    assert reader.dequeue(timeout=2) == "second"  # vLLM's own idle mode looks again after five seconds
    late.join()


def test_rest_that_is_not_allowed_never_rests():
    rest = Rest()

    rest.step(0)

    assert not rest.resting


def test_a_queue_of_another_kind_is_left_alone():
    class Unknown:
        pass

    assert not let_rest(Rest(), Unknown)


@pytest.mark.parametrize(
    ("shares_cores", "num_tokens", "rests"),
    [
        (True, 0, True),
        (False, 0, True),
        (True, 1, False),
        (True, 64, False),
        (True, 1024, True),
        (False, 8192, False),
    ],
)
def test_readers_rest_without_work_and_during_long_steps_on_their_own_cores(shares_cores, num_tokens, rests):
    rest = Rest()
    rest.allowed, rest.shares_cores = True, shares_cores
    rest.step(num_tokens)

    assert rest.resting is rests
