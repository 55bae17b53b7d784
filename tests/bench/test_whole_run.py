"""A whole benchmark against fake engines: real router, real load generator, real records; interrupted, resumed, reported."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbaton.bench.store import Store
from kvbaton.testing.fake_engine import FakeEngine
from kvbaton.testing.fake_script import FakeFabric, Script
from kvbaton.workload.record import CellResult, Header, Skipped

pytestmark = [
    pytest.mark.stress,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="the load generator is vLLM's (make install)"
    ),
]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    fabric = FakeFabric()
    async with FakeEngine(fabric).serving() as prefill, FakeEngine(fabric).serving() as decode:
        yield prefill, decode


def command(out: Path, prefill: FakeEngine, decode: FakeEngine, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "kvbaton", "bench", "--out", str(out), "--attach", f"ours-push={prefill.url},{decode.url}",
        "--model", "nano", "--cells", "128@20", "--requests", "4", "--unloaded-requests", "2", "--output-tokens", "4", *more,
    ]  # fmt: skip


async def run(argv: list[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_run_measures_resumes_and_reports(pair: tuple[FakeEngine, FakeEngine], tmp_path: Path) -> None:
    status, output = await run(command(tmp_path, *pair, "--repeats", "1"))
    first = Store(tmp_path).records

    assert status == 0, output
    results = [record for record in first if isinstance(record, CellResult)]
    assert [(result.rate_per_s, len(result.requests)) for result in results] == [(None, 2), (20.0, 4)]
    for request in (request for result in results for request in result.requests):
        assert request.error is None
        assert request.mode == "push"
        assert request.exposed_s is not None
    assert results[1].rho is not None
    assert results[1].topology == "remote"
    assert "kvbaton push, whole" in (tmp_path / "report.md").read_text()

    status, output = await run(command(tmp_path, *pair, "--repeats", "2"))
    second = Store(tmp_path).records

    assert status == 0, output
    assert second[: len(first)] == first
    assert [record.repeat for record in second[len(first) :] if isinstance(record, CellResult)] == [1, 1]
    assert sum(isinstance(record, Header) for record in second) == 2


async def test_failing_engines_are_recorded_and_tried_again(
    pair: tuple[FakeEngine, FakeEngine], tmp_path: Path
) -> None:
    pair[0].always(Script(status=500))
    status, output = await run(command(tmp_path, *pair, "--repeats", "1"))

    assert status == 1, output
    skipped = [record for record in Store(tmp_path).records if isinstance(record, Skipped)]
    assert len(skipped) == 2
    assert not any(record.final for record in skipped)
    assert Store(tmp_path).done() == set()


async def test_interrupt_stops_everything_and_says_how_to_go_on(
    pair: tuple[FakeEngine, FakeEngine], tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(tmp_path, *pair, "--repeats", "1", "--cells", "128@0.01"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    while b"128@0.01" not in (line := await process.stdout.readline()) or b"repeat" not in line:
        assert line, "it ended before it was interrupted"
    process.send_signal(signal.SIGTERM)
    rest = (await process.stdout.read()).decode()

    assert await process.wait() == 130
    assert "The same command resumes" in rest
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _mentions(pid, str(pair[0].url))]


def _mentions(pid: str, word: str) -> bool:
    try:
        return word.encode() in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False
