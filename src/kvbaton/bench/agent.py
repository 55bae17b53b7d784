"""Agent: the benchmark's end of the pipe to the client process, with a deadline on every order."""

import json
import selectors
import time
from typing import Any, Final

from kvbaton.base.errors import KvbatonError
from kvbaton.bench.engines import Spec
from kvbaton.bench.processes import ProcessEnded, Processes

BENCHMARK_LOAD_S: Final = 180.0
QUICK_S: Final = 30.0
READ_BYTES: Final = 1 << 20


class OrderFailed(KvbatonError):
    """The client could not do what it was asked; carries its own words."""


class Agent:
    """Sends orders to one client process.

    Owner: the benchmark's main thread. Lifetime: as long as the process, which `Processes` stops.
    """

    def __init__(self, processes: Processes, spec: Spec) -> None:
        self._processes = processes
        self._spec = spec
        process = processes.start(spec, piped=True)
        if process.stdin is None or process.stdout is None:
            raise KvbatonError("the client was started without pipes")
        self._orders = process.stdin
        self._answers = process.stdout
        self._buffer = bytearray()

    def is_ready(self, url: str) -> bool:
        """Whether a health address answers 200."""
        return bool(self._ask({"do": "ready", "url": url}, QUICK_S))

    def fetch(self, url: str) -> Any:
        """The JSON document at an address."""
        return self._ask({"do": "fetch", "url": url}, QUICK_S)

    def complete(
        self, url: str, bodies: list[dict[str, Any]], *, at_once: int, timeout_s: float
    ) -> list[Any]:
        """Answers to completions requests, in order."""
        order = {"do": "complete", "url": url, "bodies": bodies, "at_once": at_once}
        answers: list[Any] = self._ask(order, timeout_s)
        return answers

    def load(self, argv: list[str], timeout_s: float) -> Any:
        """The saved result of one run of vLLM's serving benchmark."""
        return self._ask({"do": "load", "argv": argv}, timeout_s)

    def prepare(self) -> None:
        """Have vLLM's benchmark loaded."""
        self._ask({"do": "prepare"}, BENCHMARK_LOAD_S)

    def _ask(self, order: dict[str, Any], timeout_s: float) -> Any:
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            raise ProcessEnded(self._spec.name, "stopped listening", self._spec.log_path) from None
        answer = json.loads(self._read_line(order["do"], timeout_s))
        if "error" in answer:
            raise OrderFailed(f"{order['do']}: {answer['error']}")
        return answer["ok"]

    def _read_line(self, what: str, timeout_s: float) -> bytes:
        """Raises OrderFailed when the deadline passes or an engine ends meanwhile."""
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while True:
                newline = self._buffer.find(b"\n")
                if newline >= 0:
                    line = bytes(self._buffer[:newline])
                    del self._buffer[: newline + 1]
                    return line
                if selector.select(timeout=1.0):
                    data = self._answers.read1(READ_BYTES)  # type: ignore[attr-defined]  # a BufferedReader
                    if not data:
                        raise ProcessEnded(self._spec.name, "ended", self._spec.log_path)
                    self._buffer += data
                    continue
                self._processes.check_alive()
                if time.monotonic() > end_s:
                    raise OrderFailed(f"{what}: no answer within {timeout_s:.0f} s")
