"""`kvbaton up` with real engines: the demonstration answers, and a bad engine is named with its cause."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.launch.groups import PROC

pytestmark = pytest.mark.engine

LIMIT_S = 400


def up(log_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kvbaton",
        "up",
        "--model",
        "nano",
        "--port",
        "0",
        "--log-dir",
        str(log_dir),
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def processes_naming(text: str) -> list[str]:
    found = []
    for path in PROC.glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


def test_demo_answers_every_request_and_leaves_nothing_running(tmp_path: Path) -> None:
    done = up(tmp_path, "--demo")

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if " push " in f"{line} "].count(
        "short"
    ) == 3
    assert "stopping" in done.stdout
    assert processes_naming(str(tmp_path)) == []


def test_engine_that_refuses_its_flags_is_named_with_the_cause(tmp_path: Path) -> None:
    done = up(tmp_path, "--engine-arg=--no-such-flag")

    assert done.returncode == 1
    assert "failed: exit status 2" in done.stderr
    assert "likely cause: " in done.stderr
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert processes_naming(str(tmp_path)) == []
