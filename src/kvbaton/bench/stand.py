"""Stand: bring one contender up where it belongs, and take it down again however its measuring ends."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbaton.bench.agent import Agent
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import Contender
from kvbaton.bench.engines import (
    Lineup,
    Model,
    Place,
    attached_lineup,
    client_spec,
    hooks_dir,
    lineup,
)
from kvbaton.bench.measure import Stand
from kvbaton.bench.processes import ProcessEnded, Processes
from kvbaton.bench.site import Site


@contextlib.contextmanager
def standing(
    config: BenchConfig, contender: Contender, model: Model, site: Site, folder: Path
) -> Iterator[Stand]:
    """Boot a contender, give it when it serves, stop it afterwards.

    Raises:
        ProcessEnded: a process ended or was not ready in time.
    """
    environment = dict(os.environ)
    places = site.places()
    attached = config.attached.get(contender.key)
    if attached is None:
        plan = lineup(config, contender, model, places, folder, environment)
    else:
        plan = attached_lineup(contender, attached, places.router, folder, environment)
    hooks = {spec.name: hooks_dir(folder, spec.name) for spec in plan.engines}
    make_empty(hooks)
    with Processes() as processes:
        agent = boot(config, plan, processes, folder, places.router, environment)
        yield Stand(config, contender, plan, site.topology, model, agent, processes, hooks)


def boot(
    config: BenchConfig,
    plan: Lineup,
    processes: Processes,
    folder: Path,
    client: Place,
    env: Mapping[str, str],
) -> Agent:
    """Start engines, router and load generator, and wait until all of them are ready."""
    agent = Agent(processes, client_spec(client.namespace, config.client_nice, folder, env))
    for spec in plan.engines:
        processes.start(spec)
    waiting = list(plan.engines)
    if plan.router is not None:
        processes.start(plan.router)
        waiting.append(plan.router)
    end_s = time.monotonic() + config.ready_timeout_s
    while waiting:
        waiting = [spec for spec in waiting if not agent.is_ready(spec.health_url)]
        processes.check_alive()
        if waiting and time.monotonic() > end_s:
            late = waiting[0]
            raise ProcessEnded(late.name, f"not ready after {config.ready_timeout_s:.0f} s", late.log_path)
        processes.pause()
    agent.prepare()
    return agent


def make_empty(folders: Mapping[str, Path]) -> None:
    """Make folders for hook times, without what an earlier run left in them."""
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
