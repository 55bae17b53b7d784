"""What must be settled on this machine before the first process starts: model, ports, cores, folders."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvbaton.base.errors import ConfigError, KvbatonError
from kvbaton.launch.config import OUR_CONNECTOR, UpConfig
from kvbaton.launch.model import is_builtin
from kvbaton.launch.ports import consecutive_ports, free_ports, router_port
from kvbaton.launch.specs import ProcessSpec, deal_cores, engine_spec, router_spec, seats, trace_path


@dataclass(frozen=True, slots=True)
class Deployment:
    """A configuration with everything filled in that depends on this machine."""

    config: UpConfig
    engines: tuple[ProcessSpec, ...]
    router: ProcessSpec
    log_dir: Path
    trace_paths: tuple[Path, ...]


class ModelNotMade(KvbatonError):
    """A built-in model could not be made; carries the program's own words."""


def prepare(config: UpConfig, environment: Mapping[str, str]) -> Deployment:
    """Settle what depends on the machine.

    Raises:
        ConfigError: something needed is not installed, or a port or path cannot be had.
        ModelNotMade: making the built-in model failed.
    """
    require_installed(config)
    model = resolve_model(config.model)
    log_dir = make_log_dir(config.log_dir, environment)
    num_ports = 2 * config.num_engines
    port = router_port(config.host, config.port, is_default=config.port == UpConfig().port)
    if config.engine_port:
        ports = consecutive_ports(config.host, config.engine_port, num_ports)
    else:
        ports = free_ports(config.host, num_ports)
    cores = config.cores or deal_cores(
        sorted(os.sched_getaffinity(0)), config.num_engines, config.tensor_parallel
    )
    places = seats(config, ports, cores)
    engines = tuple(engine_spec(config, seat, model, log_dir, environment) for seat in places)
    ours = config.connector == OUR_CONNECTOR
    return Deployment(
        config=config,
        engines=engines,
        router=router_spec(config, port, engines, log_dir, environment),
        log_dir=log_dir,
        trace_paths=tuple(trace_path(log_dir, seat) for seat in places) if ours else (),
    )


def require_installed(config: UpConfig) -> None:
    """Refuse to start what cannot work, in words that say what to install."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "device", config.device.value, "vLLM installed here (pip install 'kvbaton[cpu]', or vllm)"
        )
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("connector", config.connector, "NIXL installed here (pip install 'kvbaton[nixl]')")


def resolve_model(name: str) -> str:
    """Return what vLLM should load: a folder for a built-in or local model, else the hub name unchanged.

    A built-in model is made by a process of its own, so that the launcher never loads torch.
    """
    if is_builtin(name):
        done = subprocess.run(
            [sys.executable, "-m", "kvbaton.launch.model", name], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ModelNotMade(f"the model {name!r} could not be made:\n{done.stderr.strip()}")
        return done.stdout.strip().splitlines()[-1]
    path = Path(name).expanduser()
    looks_local = name.startswith(("/", ".", "~"))
    if path.is_dir() or looks_local:
        if not (path / "config.json").is_file():
            raise ConfigError("model", name, "a folder with a config.json, a built-in name, or a hub name")
        return str(path.resolve())
    return name


def make_log_dir(wanted: Path | None, environment: Mapping[str, str]) -> Path:
    """Return a folder for this run's logs, made if need be."""
    if wanted is None:
        state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        started = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        wanted = Path(state) / "kvbaton" / f"up-{started}-{os.getpid()}"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("log_dir", str(wanted), f"a folder that can be made ({error.strerror})") from error
    return wanted.resolve()


def describe(deployment: Deployment) -> Sequence[str]:
    """Return the lines a user sees before the boot."""
    config = deployment.config
    return (
        f"kvbaton: {config.prefill} prefill + {config.decode} decode, {config.connector} ({config.mode}), "
        f"model {config.model}, {config.device}",
        f"  logs in {deployment.log_dir}",
    )
