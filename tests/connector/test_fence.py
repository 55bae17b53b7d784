import threading

from kvbaton.base.ids import RequestId
from kvbaton.connector.fence import EventFence, NoFence
from kvbaton.runtime.commands import CancelReceive

ONE, TWO, THREE = (CancelReceive(RequestId(name)) for name in "abc")


class Event:
    def __init__(self) -> None:
        self._passed = threading.Event()

    def let_pass(self) -> None:
        self._passed.set()

    def synchronize(self) -> None:
        if not self._passed.wait(10):
            raise TimeoutError


def test_event_fence_keeps_order_and_waits_for_the_device():
    handed, event, arrived = [], Event(), threading.Event()

    def hand_over(commands) -> None:
        handed.extend(commands)
        if THREE in commands:
            arrived.set()

    fence = EventFence(hand_over, lambda: event)
    fence.submit([ONE])
    fence.submit_after_forward([TWO])
    fence.submit([THREE])

    assert not arrived.is_set()
    event.let_pass()
    fence.drain()
    assert handed == [ONE, TWO, THREE]
    fence.close()


def test_event_fence_survives_a_device_error():
    handed = []

    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("device lost")

    fence = EventFence(handed.extend, Broken)
    fence.submit_after_forward([ONE])
    fence.submit([TWO])
    fence.drain()

    assert handed == [TWO]
    fence.close()


def test_no_fence_hands_over_at_once():
    handed = []
    fence = NoFence(handed.extend)
    fence.submit([ONE])
    fence.submit_after_forward([TWO])
    fence.drain()
    fence.close()

    assert handed == [ONE, TWO]
