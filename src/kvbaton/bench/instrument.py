"""Instrument: a connector with its hooks timed, loaded by vLLM in place of the connector itself.

An engine under test gets `kv_connector_module_path` = this module with its connector's ordinary name. vLLM then asks this
module for that name and receives a subclass that counts calls and time of every hook, written the same way for all
contenders. The calls that hand descriptors to NIXL are counted too, under the name of the thread that made them.

PATCHES names what is taken away from upstream's connector, which has no settings for it; contenders that use it say so in
their names. On CPU engines upstream pins the thread that computes to the last core of its NUMA node, so that two engines on
one node share a core whatever VLLM_CPU_OMP_THREADS_BIND says (vLLM issue 58033 is about the same line); and NIXL's progress
thread spins.

Everything here runs inside an engine and loads vLLM, NIXL and the connector by name only.
"""

import functools
import importlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HOOKS_DIR: Final = "KVBATON_BENCH_HOOKS_DIR"
PATCHES: Final = "KVBATON_BENCH_PATCHES"
NO_PROGRESS_THREAD: Final = "progress-thread"
NO_PINNING: Final = "pinning"
WRITE_EVERY_S: Final = 0.25

UPSTREAM: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
UPSTREAM_NIXL_LOADER: Final = "vllm.distributed.nixl_utils"
HOME_BY_CONNECTOR: Final = {
    "NixlConnector": UPSTREAM,
    "NixlPullConnector": UPSTREAM,
    "NixlPushConnector": UPSTREAM,
    "BatonConnector": "kvbaton.connector",
}

SCHEDULER_HOOKS: Final = (
    "on_new_request", "get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished", "request_finished_all_groups", "take_events", "has_pending_block_frees",
    "has_pending_push_work",
)  # fmt: skip
WORKER_HOOKS: Final = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "finish_forward", "wait_for_save", "get_finished", "get_transfer_results", "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip
BOTH_SIDES: Final = ("get_kv_connector_stats",)
STEP_BEGINS: Final = ("build_connector_meta", "bind_connector_metadata")
"""Whichever a thread calls first begins its steps: the scheduler's the one, a worker's the other."""

STEP: Final = "step."
"""Begins the names under which steps are counted; an upper edge of their hooks' CPU time in microseconds follows."""

Method = Callable[..., Any]


class Recorder:
    """Sums by (side, hook): calls, wall seconds, CPU seconds, amount.

    Owner: the process; hooks of different threads add under one lock. A thread of its own writes the sums to a file, so no
    hook ever waits for a disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], list[float]] = {}
        self._dirty = threading.Event()
        self._pause = threading.Event()
        self._inside = threading.local()
        self._writer = threading.Thread(target=self._write_for_ever, name="kvbaton-bench", daemon=True)

    def timed(self, side: Callable[[Any], str], name: str, call: Method, amount: Method | None) -> Method:
        """Wrap a method. Time inside another wrapped hook is the outer one's."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "hook", False) and amount is None:
                return call(*args, **kwargs)
            nested = getattr(self._inside, "hook", False)
            self._inside.hook = True
            if name in STEP_BEGINS:
                self._begin_step(side(args[0]), name)
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
                self._inside.hook = nested
                counted = 0 if amount is None else amount(*args, **kwargs)
                self._add(side(args[0]), name, wall_s, cpu_s, counted)
                if amount is None:
                    self._inside.step_cpu_s = getattr(self._inside, "step_cpu_s", 0.0) + cpu_s

        return wrapper

    def _begin_step(self, side: str, hook: str) -> None:
        """Count the step before under the CPU time that its hooks took."""
        begins = getattr(self._inside, "begins", None)
        cpu_s, self._inside.step_cpu_s = getattr(self._inside, "step_cpu_s", 0.0), 0.0
        if begins is None:
            self._inside.begins = hook
        elif begins == hook:
            self._add(side, f"{STEP}{step_edge_us(cpu_s)}", cpu_s, cpu_s, 0)
        else:
            self._inside.step_cpu_s = cpu_s

    def _add(self, side: str, hook: str, wall_s: float, cpu_s: float, amount: int) -> None:
        with self._lock:
            if not self._sums:
                self._writer.start()
            sums = self._sums.setdefault((side, hook), [0, 0.0, 0.0, 0])
            sums[0] += 1
            sums[1] += wall_s
            sums[2] += cpu_s
            sums[3] += amount
        self._dirty.set()

    def _write_for_ever(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{os.getpid()}.json"
        while True:
            self._dirty.wait()
            self._dirty.clear()
            with self._lock:
                rows = [[side, hook, *sums] for (side, hook), sums in self._sums.items()]
            scratch = path.with_suffix(".tmp")
            scratch.write_text(json.dumps(rows), encoding="utf-8")
            scratch.replace(path)  # a reader never sees half a file
            self._pause.wait(WRITE_EVERY_S)


def step_edge_us(cpu_s: float) -> int:
    """The upper edge of the class a step belongs to; four classes to an octave."""
    return round(10 * 2 ** (max(0, math.ceil(4 * math.log2(max(cpu_s, 1e-9) / 1e-5))) / 4))


@functools.cache
def recorder() -> Recorder | None:
    """The process's recorder, or None where nobody asked for one."""
    folder = os.environ.get(HOOKS_DIR)
    return Recorder(Path(folder)) if folder else None


@functools.cache
def instrumented(name: str) -> type:
    """The named connector with its hooks timed."""
    base: Any = getattr(importlib.import_module(HOME_BY_CONNECTOR[name]), name)
    sums = recorder()

    @functools.wraps(base.__init__)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare_nixl(HOME_BY_CONNECTOR[name])
        base.__init__(self, *args, **kwargs)

    members: dict[str, Any] = {"__module__": __name__, "__doc__": base.__doc__, "__init__": start}
    if sums is not None:
        for side, hooks in (("scheduler", SCHEDULER_HOOKS), ("worker", WORKER_HOOKS)):
            for hook in hooks:
                if hasattr(base, hook):
                    members[hook] = sums.timed(
                        functools.partial(_fixed, side), hook, getattr(base, hook), None
                    )
        for hook in BOTH_SIDES:
            if hasattr(base, hook):
                members[hook] = sums.timed(_side_of_connector, hook, getattr(base, hook), None)
    return type(name, (base,), members)


def prepare_nixl(home: str) -> None:
    """Patch NIXL's Python classes as the environment asks for; without NIXL, do nothing."""
    try:
        if (
            home == UPSTREAM
        ):  # vLLM sets a UCX variable just before it loads NIXL itself; that must not be lost
            _ = importlib.import_module(UPSTREAM_NIXL_LOADER).NixlWrapper
        api = importlib.import_module("nixl._api")
    except ImportError:
        return
    patches = os.environ.get(PATCHES, "").split(",")
    if NO_PROGRESS_THREAD in patches:
        _refuse_progress_thread(api.nixl_agent_config)
    if NO_PINNING in patches:
        _refuse_pinning(importlib.import_module("vllm.platforms").current_platform)
    sums = recorder()
    if sums is not None:
        for name, amount in (
            ("make_prepped_xfer", _indices),
            ("initialize_xfer", _descriptors),
            ("transfer", _one),
        ):
            if not hasattr(getattr(api.nixl_agent, name), "__wrapped__"):
                wrapped = sums.timed(_thread_name, f"nixl.{name}", getattr(api.nixl_agent, name), amount)
                setattr(api.nixl_agent, name, wrapped)


def _refuse_progress_thread(config: Any) -> None:
    original = config.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not hasattr(self, "enable_pthread"):
            raise RuntimeError("this NIXL names its progress thread otherwise; the patch would do nothing")
        self.enable_pthread = False

    config.__init__ = without


def _refuse_pinning(platform: Any) -> None:
    """Have the platform name no cores to pin to; only the connector asks it, and only on CPU."""
    if not platform.is_cpu():
        return
    if not hasattr(platform, "discover_numa_topology"):
        raise RuntimeError("this vLLM finds cores to pin to otherwise; the patch would do nothing")
    type(platform).discover_numa_topology = classmethod(lambda _platform: [])


def _fixed(side: str, _connector: Any) -> str:
    return side


def _side_of_connector(connector: Any) -> str:
    return str(connector.role.name).lower()


def _thread_name(_agent: Any) -> str:
    name = threading.current_thread().name
    return "engine thread" if name == "MainThread" else name


def _indices(_agent: Any, _operation: str, _local: Any, indices: Any, *_rest: Any, **_more: Any) -> int:
    return len(indices)


def _descriptors(_agent: Any, _operation: str, descriptors: Any, *_rest: Any, **_more: Any) -> int:
    return int(descriptors.descCount())


def _one(*_args: Any, **_more: Any) -> int:
    return 1


def __getattr__(name: str) -> type:
    """Give vLLM the connector it names."""
    if name in HOME_BY_CONNECTOR:
        return instrumented(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
