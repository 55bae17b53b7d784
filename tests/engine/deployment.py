"""A deployment of real engines for tests: each process can be killed and started again, with or without changes."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kvbaton.launch.config import OUR_CONNECTOR, JsonValue, UpConfig
from kvbaton.launch.failure import report_failure
from kvbaton.launch.groups import group_runs, signal_group, stop_groups
from kvbaton.launch.guard import Guard
from kvbaton.launch.ports import free_ports
from kvbaton.launch.prepare import prepare
from kvbaton.launch.specs import ProcessSpec, Role
from kvbaton.launch.supervisor import launcher_environment
from kvbaton.protocol.mode import Mode

HOST = "127.0.0.1"
BOOT_LIMIT_S = 240.0
POLL_S = 0.1
GRACE_S = 8.0

# Times of a deployment that a test need not wait long for.
QUICK: Mapping[str, JsonValue] = {"park_s": 10, "lease_s": 10, "handoff_timeout_s": 15}


class NotReached(AssertionError):
    """Something awaited did not happen in time."""


def wait_until(condition: Callable[[], bool], limit_s: float, what: str | Callable[[], str]) -> float:
    """Wait for a condition and return how long it took."""
    started_s = time.monotonic()
    idle = threading.Event()
    while not condition():
        waited_s = time.monotonic() - started_s
        if waited_s > limit_s:
            raise NotReached(f"after {waited_s:.0f} s: {what if isinstance(what, str) else what()}")
        idle.wait(POLL_S)
    return time.monotonic() - started_s


def get(url: str, timeout_s: float = 5.0) -> str | None:
    """Return a page, or None if it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.read().decode()
    except (urllib.error.URLError, OSError, TimeoutError):
        return None


class Actor:
    """One process of a deployment.

    Owner: its deployment.
    """

    def __init__(self, spec: ProcessSpec, guard: Guard) -> None:
        self.spec = spec
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def group(self) -> int:
        assert self._process is not None, f"{self.spec.name} was not started"
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, change: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec) -> None:
        spec = change(self.spec)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(spec.environment),
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)

    def wait_ready(self, limit_s: float = BOOT_LIMIT_S) -> float:
        def ready() -> bool:
            if not self.runs:
                raise NotReached(report_failure(self.spec.name, "ended", self.spec.log_path).render())
            return get(self.spec.health_url) is not None

        return wait_until(
            ready, limit_s, lambda: report_failure(self.spec.name, "not ready", self.spec.log_path).render()
        )

    def kill(self) -> None:
        """End every process of this engine at once, as a power failure would."""
        signal_group(self.group, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        if self._process is None:
            return
        wait_until(lambda: not group_runs(self.group), 20, f"{self.spec.name} does not end")
        self._process.wait()
        self._guard.forget(self.group)
        self._process = None

    def log(self) -> str:
        return self.spec.log_path.read_text(encoding="utf-8", errors="replace")

    def log_since(self, mark: int) -> str:
        return self.log()[mark:]

    def gauges(self) -> dict[str, float]:
        """Return every sample of /metrics, summed over labels."""
        text = get(f"{self.url}/metrics") or ""
        return samples(text)


def samples(text: str) -> dict[str, float]:
    """Return Prometheus samples: the sum under the bare name, and each under name{labels}."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", line)
        if match is None:
            continue
        name, labels, value = match.group(1), match.group(2), float(match.group(3))
        found[name] = found.get(name, 0.0) + value
        if labels:
            found[name + labels] = value
    return found


class Deployment:
    """Engines and, in front of them, one router per mode.

    Owner: a fixture. Lifetime: `with`; everything is stopped at its end, also when the test process dies (a guard sees to it).
    """

    def __init__(
        self,
        config: UpConfig,
        change: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec,
        *,
        alone: bool = False,
    ) -> None:
        plan = prepare(dataclasses.replace(config, port=0), launcher_environment())
        self.config = config
        self.folder = plan.log_dir
        self.trace_paths = plan.trace_paths
        self._guard = Guard(GRACE_S)
        actors = [Actor(change(spec), self._guard) for spec in plan.engines]
        self.prefill = [actor for actor in actors if actor.spec.role is Role.PREFILL]
        self.decode = [] if alone else [actor for actor in actors if actor.spec.role is Role.DECODE]
        self._router_spec = plan.router
        self._routers: dict[tuple[str, ...], Actor] = {}

    @property
    def engines(self) -> list[Actor]:
        return [*self.prefill, *self.decode]

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _boot(self) -> None:
        for actor in self.engines:
            actor.start()
        for actor in self.engines:
            actor.wait_ready()

    def stop(self) -> None:
        actors = [*self._routers.values(), *self.engines]
        stop_groups([actor.group for actor in actors if actor._process is not None], GRACE_S)
        for actor in actors:
            actor.reap()
        self._guard.close()

    def router(self, mode: Mode | None = None, *arguments: str) -> Actor:
        """Return the router of a mode, started if need be."""
        mode = self.config.mode if mode is None else mode
        key = (mode.value, *arguments)
        actor = self._routers.get(key)
        if actor is not None and actor.runs:
            return actor
        port = next(free_ports(HOST, 1))
        argv = list(self._router_spec.argv)
        argv[argv.index("--port") + 1] = str(port)
        argv[argv.index("--mode") + 1] = mode.value
        spec = dataclasses.replace(
            self._router_spec,
            argv=(*argv, *arguments),
            log_path=self.folder / f"router-{'-'.join(key).replace('--', '')}.log",
            url=f"http://{HOST}:{port}",
        )
        actor = Actor(spec, self._guard)
        self._routers[key] = actor
        actor.start()
        actor.wait_ready(30)
        return actor

    def add(self, spec: ProcessSpec) -> Actor:
        """Start another process that ends with this deployment."""
        key = ("added", spec.name)
        if key not in self._routers or not self._routers[key].runs:
            self._routers[key] = Actor(spec, self._guard)
            self._routers[key].start()
        self._routers[key].wait_ready(60)
        return self._routers[key]

    @property
    def routers(self) -> list[Actor]:
        return [actor for actor in self._routers.values() if actor.runs]

    def trace_marks(self) -> dict[Path, int]:
        """Remember how far the workers' notes go now."""
        return {path: len(read_traces(path)) for path in self.trace_paths}

    def traces(self, marks: Mapping[Path, int] | None = None) -> list[dict[str, JsonValue]]:
        """Return what the workers noted of ended handoffs, after the marks."""
        since = marks or {}
        return [entry for path in self.trace_paths for entry in read_traces(path)[since.get(path, 0) :]]

    def received(self, marks: Mapping[Path, int]) -> list[dict[str, JsonValue]]:
        """Return what consumers noted after the marks."""
        return [entry for entry in self.traces(marks) if entry["side"] == "consumer"]


def read_traces(path: Path) -> list[dict[str, JsonValue]]:
    """Read a trace file; an engine creates it when it starts."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- changes to a process's command line ------------------------------------------------------------------------------


def without_connector(spec: ProcessSpec) -> ProcessSpec:
    """The engine as it is without us: what answers are compared with."""
    at = spec.argv.index("--kv-transfer-config")
    return dataclasses.replace(spec, argv=spec.argv[:at] + spec.argv[at + 2 :])


def with_transfer(**changes: JsonValue) -> Callable[[ProcessSpec], ProcessSpec]:
    """Change members of --kv-transfer-config."""

    def change(spec: ProcessSpec) -> ProcessSpec:
        at = spec.argv.index("--kv-transfer-config") + 1
        config = json.dumps(json.loads(spec.argv[at]) | changes, sort_keys=True)
        return dataclasses.replace(spec, argv=(*spec.argv[:at], config, *spec.argv[at + 1 :]))

    return change


def with_option(name: str, value: str) -> Callable[[ProcessSpec], ProcessSpec]:
    """Set one option of the engine."""

    def change(spec: ProcessSpec) -> ProcessSpec:
        if name not in spec.argv:
            return dataclasses.replace(spec, argv=(*spec.argv, name, value))
        at = spec.argv.index(name) + 1
        return dataclasses.replace(spec, argv=(*spec.argv[:at], value, *spec.argv[at + 1 :]))

    return change


def with_environment(**values: str) -> Callable[[ProcessSpec], ProcessSpec]:
    """Set environment variables of the engine."""
    return lambda spec: dataclasses.replace(spec, environment={**spec.environment, **values})


def chained(*changes: Callable[[ProcessSpec], ProcessSpec]) -> Callable[[ProcessSpec], ProcessSpec]:
    """Apply changes in order."""

    def change(spec: ProcessSpec) -> ProcessSpec:
        for each in changes:
            spec = each(spec)
        return spec

    return change


@contextlib.contextmanager
def machine_lock(path: str | None) -> Iterator[IO[str] | None]:
    """Hold a lock file while engines run, where several test runs share a machine."""
    if path is None:
        yield None
        return
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def small(folder: Path, **changes: object) -> UpConfig:
    """The configuration tests start from: a tiny model in float32, where equal computation gives equal tokens.

    The connector may be named in KVBATON_ENGINE_CONNECTOR, to try the tests themselves on vLLM's own.
    """
    connector = os.environ.get("KVBATON_ENGINE_CONNECTOR", OUR_CONNECTOR)
    ours = connector == OUR_CONNECTOR
    settings: dict[str, object] = {
        "model": "nano",
        "connector": connector,
        "mode": Mode.PULL if connector == "NixlConnector" else Mode.PUSH,
        "connector_config": {**QUICK, "verify": True} if ours else {},
        "dtype": "float32",
        "engine_args": ("--num-gpu-blocks-override", "512"),
        "log_dir": folder,
    }
    return UpConfig(**(settings | changes))  # type: ignore[arg-type]  # UpConfig checks its fields itself
