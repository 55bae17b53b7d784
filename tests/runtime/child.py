"""The test's end of a rank that runs in its own process."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from kvbaton.base.ids import EngineAddress, EngineId

TIMEOUT_S = 40.0


class Child:
    """A process running `rank_child`; killed when the test leaves."""

    def __init__(
        self,
        name: str,
        *,
        num_blocks: int,
        block_bytes: int,
        port: int = 0,
        env: dict[str, str] | None = None,
    ) -> None:
        here = Path(__file__).parent
        self.name = name
        self._heard: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(here / "rank_child.py"), name, str(port), str(num_blocks), str(block_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(here.parent), **(env or {})},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name=f"reader-{name}", daemon=True)
        self._reader.start()
        self.port = int(self.hear("port")["port"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()

    @property
    def address(self) -> EngineAddress:
        return EngineAddress("127.0.0.1", self.port, EngineId(self.name))

    def tell(self, do: str, **words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()

    def hear(self, *keys: str) -> dict[str, Any]:
        """The next line that has these keys."""
        while True:
            try:
                line = self._lines.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise TimeoutError(f"{self.name} did not say {keys}") from None
            if set(keys) <= line.keys():
                return line

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # NIXL prints, too
                self._lines.put(json.loads(line))
