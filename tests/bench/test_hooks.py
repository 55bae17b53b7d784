"""The instrument counts what connectors do, once, and changes nothing they return."""

import json
import threading
from pathlib import Path

import pytest

from kvbaton.bench import instrument
from kvbaton.bench.hooks import Sums, hooks_between, read_hooks
from kvbaton.bench.instrument import Recorder

TIMEOUT_S = 10.0


def written(folder: Path) -> dict[tuple[str, str, str], Sums]:
    return read_hooks({"prefill": folder})


def wait_written(folder: Path, calls: int, hook: str) -> dict[tuple[str, str, str], Sums]:
    """Wait until the recorder's own thread has written so many calls of a hook."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.02)):
        found = written(folder)
        if any(key[2] == hook and sums.calls == calls for key, sums in found.items()):
            return found
        pause.wait(0.02)
    raise AssertionError(f"not written in {TIMEOUT_S} s: {written(folder)}")


class Connector:
    def outer(self, value: int) -> int:
        return self.inner(value) + 1

    def inner(self, value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return 2 * value


def timed(recorder: Recorder) -> type[Connector]:
    def side(_connector: object) -> str:
        return "worker"

    members = {
        name: recorder.timed(side, name, getattr(Connector, name), None) for name in ("outer", "inner")
    }
    return type("Connector", (Connector,), members)


def test_hooks_return_and_raise_as_before(tmp_path: Path) -> None:
    connector = timed(Recorder(tmp_path))()

    assert connector.outer(3) == 7
    with pytest.raises(ValueError):
        connector.inner(-1)


def test_hook_called_by_a_hook_counts_there_only(tmp_path: Path) -> None:
    connector = timed(Recorder(tmp_path))()

    connector.outer(1)
    connector.outer(2)

    found = wait_written(tmp_path, 2, "outer")
    assert {key[2] for key in found} == {"outer"}
    assert found["prefill", "worker", "outer"].wall_s > 0


def test_hook_that_raised_is_counted_and_the_next_one_too(tmp_path: Path) -> None:
    connector = timed(Recorder(tmp_path))()
    with pytest.raises(ValueError):
        connector.outer(-1)

    connector.inner(1)

    wait_written(tmp_path, 1, "outer")
    wait_written(tmp_path, 1, "inner")


def test_call_with_an_amount_counts_inside_a_hook_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    post = recorder.timed(
        lambda _agent: "engine thread",
        "nixl.transfer",
        lambda _agent, items: len(items),
        lambda _agent, items: len(items),
    )
    hook = recorder.timed(
        lambda _connector: "worker", "start_load_kv", lambda _connector: post(None, [1, 2, 3]), None
    )

    assert hook(None) == 3

    found = wait_written(tmp_path, 1, "start_load_kv")
    assert found["prefill", "engine thread", "nixl.transfer"].amount == 3


def test_unknown_connector_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        instrument.NoSuchConnector  # noqa: B018


def test_progress_thread_patch_changes_that_setting_only() -> None:
    class Config:
        def __init__(self, enable_prog_thread: bool = True, backends: tuple[str, ...] = ("UCX",)) -> None:
            self.enable_pthread = enable_prog_thread
            self.backends = backends

    instrument._refuse_progress_thread(Config)
    instrument._refuse_progress_thread(Config)

    assert not Config(enable_prog_thread=True).enable_pthread
    assert Config(backends=("LIBFABRIC",)).backends == ("LIBFABRIC",)


class Platform:
    cpu = True

    def is_cpu(self) -> bool:
        return self.cpu


def test_pinning_patch_names_no_cores() -> None:
    class Pinning(Platform):
        @classmethod
        def discover_numa_topology(cls) -> list[list[int]]:
            return [[0, 1]]

    instrument._refuse_pinning(Pinning())

    assert Pinning.discover_numa_topology() == []


def test_patch_without_a_target_is_refused() -> None:
    class Renamed:
        pass

    instrument._refuse_progress_thread(Renamed)

    with pytest.raises(RuntimeError):
        Renamed()
    with pytest.raises(RuntimeError):
        instrument._refuse_pinning(Platform())


def test_pinning_patch_leaves_other_devices_alone() -> None:
    class Gpu(Platform):
        cpu = False

    instrument._refuse_pinning(Gpu())


def test_ranks_of_one_engine_are_added_up(tmp_path: Path) -> None:
    for pid in (1, 2):
        (tmp_path / f"{pid}.json").write_text(json.dumps([["worker", "wait_for_save", 2, 0.5, 0.25, 1]]))

    assert written(tmp_path) == {("prefill", "worker", "wait_for_save"): Sums(4, 1.0, 0.5, 2)}


def test_cell_gets_what_was_added_meanwhile() -> None:
    key, quiet = ("prefill", "worker", "wait_for_save"), ("prefill", "worker", "finish_forward")
    rows = hooks_between(
        {key: Sums(2, 1.0, 0.5), quiet: Sums(1, 1.0, 1.0)}, {key: Sums(5, 1.5, 0.6), quiet: Sums(1, 1.0, 1.0)}
    )

    assert [(row.hook, row.calls) for row in rows] == [("wait_for_save", 3)]
    assert rows[0].wall_s == pytest.approx(0.5)


def test_steps_are_counted_by_the_cpu_time_of_their_hooks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)

    def side(_connector: object) -> str:
        return "worker"

    def compute(_connector: object, rounds: int = 0) -> int:
        return sum(range(rounds))

    begin, work = (
        recorder.timed(side, name, compute, None) for name in ("bind_connector_metadata", "get_finished")
    )
    for rounds in (1, 1, 3_000_000, 1):
        begin(None)
        work(None, rounds)
    begin(None)

    found = wait_written(tmp_path, 5, "bind_connector_metadata")
    steps = {
        int(hook.removeprefix("step.")): sums.calls for (_, _, hook), sums in found.items() if "step." in hook
    }
    assert sum(steps.values()) == 4
    assert max(steps) > 1000
    assert steps[max(steps)] == 1


@pytest.mark.parametrize(
    ("cpu_s", "edge_us"), [(0.0, 10), (1e-5, 10), (1.1e-5, 12), (2e-4, 226), (1e-3, 1076)]
)
def test_classes_of_steps_are_a_quarter_octave_wide(cpu_s: float, edge_us: int) -> None:
    assert instrument.step_edge_us(cpu_s) == edge_us
