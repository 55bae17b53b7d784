"""Processes are watched, measured and always stopped."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvbaton.bench.agent import Agent, OrderFailed
from kvbaton.bench.engines import Spec, client_spec
from kvbaton.bench.processes import ProcessEnded, Processes, cpu_s_by_group, log_tail, run_quietly

SPIN = "import time\nwhile True: pass"
FORK = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"


def spec(name: str, code: str, folder: Path) -> Spec:
    return Spec(name, (sys.executable, "-c", code), dict(os.environ), folder / f"{name}.log", "", "")


def test_leaving_stops_whole_groups(tmp_path: Path) -> None:
    with Processes() as processes:
        group = processes.start(spec("parent", FORK, tmp_path)).pid
        while cpu_s_by_group().get(group, 0.0) < 0.2:
            processes.pause()

    assert group not in cpu_s_by_group()


def test_error_inside_stops_them_too(tmp_path: Path) -> None:
    groups: list[int] = []

    def fail_inside() -> None:
        with Processes() as processes:
            groups.append(processes.start(spec("spin", SPIN, tmp_path)).pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()

    assert groups[0] not in cpu_s_by_group()


def test_cpu_seconds_grow_by_name(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(spec("spin", SPIN, tmp_path))
        while processes.cpu_s()["spin"] < 0.3:
            processes.check_alive()
            processes.pause()


def test_ended_process_is_reported_with_its_log(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(spec("brief", "import sys; sys.exit('no room left')", tmp_path)).wait()
        with pytest.raises(ProcessEnded) as caught:
            processes.check_alive()

    assert caught.value.name == "brief"
    assert "status 1" in caught.value.reason
    assert "no room left" in str(caught.value)


def test_missing_log_has_a_tail() -> None:
    assert log_tail(Path("/nonexistent")) == "(no log)"


def test_failing_helper_program_gives_its_own_words() -> None:
    assert run_quietly([sys.executable, "-c", "print('fine')"]) == "fine"
    with pytest.raises(Exception, match="not fine"):
        run_quietly([sys.executable, "-c", "import sys; sys.exit('not fine')"])


def test_client_answers_orders_it_cannot_fulfil(tmp_path: Path) -> None:
    with Processes() as processes:
        agent = Agent(processes, client_spec(None, 0, tmp_path, os.environ))

        assert not agent.is_ready("http://127.0.0.1:1/health")
        with pytest.raises(OrderFailed, match="Connect"):
            agent.fetch("http://127.0.0.1:1/kvbaton/requests")
        with pytest.raises(OrderFailed):
            agent.complete("http://127.0.0.1:1", [{}], at_once=1, timeout_s=20)


def test_client_that_never_answers_fails_the_order(tmp_path: Path) -> None:
    with Processes() as processes:
        agent = Agent(processes, spec("mute", "import sys\nfor line in sys.stdin: pass", tmp_path))
        with pytest.raises(OrderFailed, match="no answer within"):
            agent.complete("http://127.0.0.1:1", [], at_once=1, timeout_s=0.1)


def test_client_that_ends_fails_the_order(tmp_path: Path) -> None:
    with Processes() as processes:
        agent = Agent(processes, spec("gone", "import sys; sys.stdin.readline()", tmp_path))
        with pytest.raises(ProcessEnded):
            agent.is_ready("http://127.0.0.1:1")


def test_engine_that_ends_fails_an_order_in_progress(tmp_path: Path) -> None:
    with Processes() as processes:
        agent = Agent(processes, spec("mute", "import sys\nfor line in sys.stdin: pass", tmp_path))
        processes.start(spec("engine", "pass", tmp_path)).wait()
        with pytest.raises(ProcessEnded, match="engine"):
            agent.complete("http://127.0.0.1:1", [], at_once=1, timeout_s=30)


def test_long_answers_arrive_whole(tmp_path: Path) -> None:
    code = "import sys, json\nfor line in sys.stdin: print(json.dumps({'ok': ['x' * 5_000_000]}), flush=True)"
    with Processes() as processes:
        answer = Agent(processes, spec("long", code, tmp_path)).complete("", [], at_once=1, timeout_s=30)

    assert len(json.dumps(answer)) > 5_000_000
