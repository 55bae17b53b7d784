"""The supervisor against real processes: readiness, failure reports, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbaton.launch.failure import ProcessFailed
from kvbaton.launch.groups import group_runs
from kvbaton.launch.ports import free_ports
from kvbaton.launch.specs import ProcessSpec, Role
from kvbaton.launch.supervisor import Child, State, Supervisor, describe_exit

CHILD = Path(__file__).with_name("child.py")
LAUNCHER = Path(__file__).with_name("launcher.py")


def spec(kind: str, log_dir: Path, role: Role = Role.PREFILL) -> ProcessSpec:
    # Two, because a "parent" gives its grandchild the port after its own.
    port = next(free_ports("127.0.0.1", 2))
    argv = (sys.executable, str(CHILD), kind, str(port))
    return ProcessSpec(
        kind, role, argv, dict(os.environ), log_dir / f"{kind}.log", f"http://127.0.0.1:{port}"
    )


def ignore(children: Sequence[Child]) -> None:
    return


def wait_until_gone(groups: Sequence[int], timeout_s: float) -> list[int]:
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.1)):
        if not any(group_runs(group) for group in groups):
            break
        pause.wait(0.1)
    return [group for group in groups if group_runs(group)]


async def test_healthy_child_becomes_ready_and_is_stopped_on_exit(tmp_path: Path) -> None:
    async with Supervisor(ignore) as supervisor:
        child = await supervisor.start(spec("healthy", tmp_path))
        await supervisor.wait_ready([child], 30)
        assert child.state is State.READY
        group = child.group

    assert not group_runs(group)
    assert child.state is State.ENDED


async def test_crashing_child_is_reported_with_its_root_error(tmp_path: Path) -> None:
    async with Supervisor(ignore) as supervisor:
        good = await supervisor.start(spec("never-ready", tmp_path))
        bad = await supervisor.start(spec("crash", tmp_path))
        with pytest.raises(ProcessFailed) as failed:
            await supervisor.wait_ready([good, bad], 30)

    report = failed.value.report
    assert (report.name, report.reason) == ("crash", "exit status 3")
    assert report.root == "ValueError: block size 7 is odd"
    assert report.tail[-1] == "RuntimeError: engine core initialization failed"
    assert not group_runs(good.group)


async def test_child_that_never_serves_is_reported_after_the_timeout(tmp_path: Path) -> None:
    async with Supervisor(ignore) as supervisor:
        child = await supervisor.start(spec("never-ready", tmp_path))
        with pytest.raises(ProcessFailed, match="not ready after 1 s"):
            await supervisor.wait_ready([child], 1)


async def test_child_ending_later_is_noticed(tmp_path: Path) -> None:
    async with Supervisor(ignore) as supervisor:
        child = await supervisor.start(spec("healthy", tmp_path))
        await supervisor.wait_ready([child], 30)
        os.kill(child.process.pid, signal.SIGKILL)
        failed = await asyncio.wait_for(supervisor.wait_any_end(), 10)

    assert failed.report.reason == "ended by SIGKILL (out of memory?)"


async def test_stop_kills_what_ignores_sigterm_and_what_it_started(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore, grace_s=0.5)
    child = await supervisor.start(spec("parent", tmp_path))
    await supervisor.wait_ready([child], 30)

    await supervisor.stop()

    assert wait_until_gone([child.group], 5) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_launcher_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    ports = [str(port) for port in free_ports("127.0.0.1", 4)][::2]
    command = [sys.executable, str(LAUNCHER), str(CHILD), str(tmp_path), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        groups = [int(word) for word in launcher.stdout.readline().split()]
        launcher.send_signal(number)
        launcher.wait(10)

    assert len(groups) == 2
    assert wait_until_gone(groups, 20) == []


def test_describe_exit_names_signals_and_statuses() -> None:
    assert describe_exit(2) == "exit status 2"
    assert describe_exit(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert describe_exit(-200) == "ended by signal 200"
