"""Are prepared descriptor lists worth keeping, or may every transfer bring its own raw list?

Raw lists work for ranges of any length, prepared ones only for ranges of exactly one block. If raw lists cost more than
about 1.5 times the prepared ones to create and post where the cost matters (a millisecond or more), we are wrong to use
raw lists only. Run: `python benchmarks/nixl_descriptors.py` (and again with UCX_TLS=tcp); prints a table in Markdown.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import nixl
from kvbaton.base.ids import AgentName
from kvbaton.testing.agent_process import AgentProcess
from kvbaton.transport.nixl import _split_metadata

BLOCK_BYTES = 8192
NUM_BLOCKS = 2 * 16384
COUNTS = (8, 128, 1024, 8192, 16384)
REPEATS = 15
Indices = npt.NDArray[np.int32]
Maker = Callable[["Bench", Indices, Indices], Any]


class Bench:
    """One initiator, one peer process, every block of both prepared once."""

    def __init__(self, child: AgentProcess) -> None:
        self.child = child
        config = nixl.nixl_agent_config(enable_prog_thread=False)
        self.agent = nixl.nixl_agent("initiator", config)
        self.memory = np.ones(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.bases = (int(self.memory.ctypes.data), child.ready.base)
        self.agent.register_memory([(self.bases[0], self.memory.nbytes, 0, "")], "DRAM")
        self.peer = self.agent.add_remote_agent(_split_metadata(child.ready.metadata)[1])
        every = np.arange(NUM_BLOCKS, dtype=np.int32)
        self.prepared = [
            self.agent.prep_xfer_dlist(who, self.rows(side, every), "DRAM")
            for side, who in enumerate(("", self.peer))
        ]

    def rows(self, side: int, blocks: Indices) -> npt.NDArray[np.int64]:
        rows = np.empty((blocks.shape[0], 3), np.int64)
        rows[:, 0] = self.bases[side] + blocks.astype(np.int64) * BLOCK_BYTES
        rows[:, 1] = BLOCK_BYTES
        rows[:, 2] = 0
        return rows

    def create_raw(self, ours: Indices, theirs: Indices) -> Any:
        lists = [self.agent.get_xfer_descs(self.rows(i, b), "DRAM") for i, b in enumerate((ours, theirs))]
        return self.agent.initialize_xfer("WRITE", *lists, self.peer, b"n")

    def create_prepared(self, ours: Indices, theirs: Indices) -> Any:
        return self.agent.make_prepped_xfer("WRITE", self.prepared[0], ours, self.prepared[1], theirs, b"n")

    def run(self, maker: Maker, ours: Indices, theirs: Indices, clock: Callable[[], float]) -> list[float]:
        """Create, post, wait, release: what `clock`, which starts anew when read, says after each step."""
        while self.child.pipe.poll():
            self.child.pipe.recv()  # a full pipe would stop the peer
        clock()
        handle = maker(self, ours, theirs)
        readings = [clock()]
        state = self.agent.transfer(handle)
        readings.append(clock())
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        readings.append(clock())
        if state != "DONE":
            raise RuntimeError(state)
        handle.release()
        readings.append(clock())
        return readings


MAKERS: dict[str, Maker] = {"raw": Bench.create_raw, "prepared": Bench.create_prepared}


def lap_timer() -> Callable[[], float]:
    """Milliseconds since it was last read."""
    last_s = [time.perf_counter()]

    def lap() -> float:
        before_s, last_s[0] = last_s[0], time.perf_counter()
        return (last_s[0] - before_s) * 1e3

    return lap


def measure_cost(bench: Bench) -> None:
    """Print a row per number of ranges, shape of the remote side and kind of list."""
    print("| ranges | remote side | list | create | post | wait | release |\n|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for count in COUNTS:
        ours = np.arange(count, dtype=np.int32)
        scattered = rng.permutation(NUM_BLOCKS)[:count].astype(np.int32)
        for shape, theirs in (("contiguous", ours), ("scattered", scattered)):
            runs: dict[str, list[list[float]]] = {name: [] for name in MAKERS}
            for _ in range(REPEATS):
                for name, maker in MAKERS.items():  # interleaved: both see the same drift
                    runs[name].append(bench.run(maker, ours, theirs, lap_timer()))
            for name, rows in runs.items():
                cells = " | ".join(spread(step) for step in zip(*rows, strict=True))
                print(f"| {count} | {shape} | {name} | {cells} |", flush=True)


def measure_gil(bench: Bench) -> None:
    """Print the largest gap in ms that a spinning thread sees during each step, 16,384 scattered ranges."""
    gap_ms, stop = [0.0], threading.Event()

    def spin() -> None:
        last_s = time.perf_counter()
        while not stop.is_set():
            now_s = time.perf_counter()
            gap_ms[0] = max(gap_ms[0], (now_s - last_s) * 1e3)
            last_s = now_s

    def largest_gap() -> float:
        largest, gap_ms[0] = gap_ms[0], 0.0
        return largest

    sys.setswitchinterval(0.0005)
    spinner = threading.Thread(target=spin)
    spinner.start()
    ours = np.arange(16384, dtype=np.int32)
    theirs = np.random.default_rng(1).permutation(NUM_BLOCKS)[:16384].astype(np.int32)
    for name, maker in MAKERS.items():
        rows = [bench.run(maker, ours, theirs, largest_gap) for _ in range(REPEATS)]
        cells = " | ".join(spread(step) for step in zip(*rows, strict=True))
        print(f"| largest gap of a spinning thread | scattered | {name} | {cells} |", flush=True)
    stop.set()
    spinner.join()


def spread(values_ms: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values_ms):.3f} ({min(values_ms):.3f}-{max(values_ms):.3f})"


def main() -> None:
    """Run both measurements against one peer process."""
    child = AgentProcess.start(AgentName("target"), NUM_BLOCKS * BLOCK_BYTES)
    try:
        bench = Bench(child)
        every = np.arange(NUM_BLOCKS, dtype=np.int32)
        bench.run(Bench.create_prepared, every, every, lap_timer())  # touch all memory first
        measure_cost(bench)
        measure_gil(bench)
    finally:
        child.close()


if __name__ == "__main__":
    main()
