"""Describe: what a benchmark is about to do, and the commands of its engines for people who start them themselves."""

import shlex
from collections.abc import Container
from pathlib import Path

from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import Contender
from kvbaton.bench.engines import Model, Place, Places, lineup
from kvbaton.bench.plan import estimate_s, plan_visits
from kvbaton.bench.progress import duration
from kvbaton.bench.store import CellKey


def describe_plan(config: BenchConfig, done: Container[CellKey], num_checks: int) -> str:
    """What is left to do and how long it takes."""
    visits = plan_visits(config, done)
    num_cells = sum(len(visit.steps) for visit in visits)
    lines = [
        f"kvbaton bench: {len(config.contenders)} contenders, {config.repeats} repeats, model {config.model}, {config.dtype}",
        *(f"  {contender.key:<20} {contender.label}" for contender in config.contenders),
        f"  cells   {', '.join(cell.name for cell in config.cells)}  x {config.requests} requests, {config.output_tokens} tokens out",
        f"  links   {', '.join(link.name for link in config.links)}",
        f"  out     {config.out}",
        f"  left    {num_checks} token checks, {len(visits)} boots, {num_cells} cells: "
        f"about {duration(estimate_s(config, visits, num_checks))}",
    ]
    return "\n".join(lines)


def describe_commands(config: BenchConfig) -> str:
    """The command of every engine, with PREFILL_HOST and DECODE_HOST where addresses go; for use with `--attach`."""
    places = Places(
        Place(None, "PREFILL_HOST", 8100, 5600),
        Place(None, "DECODE_HOST", 8200, 5700),
        Place(None, "127.0.0.1", 8000),
        "remote",
    )
    parts = ["\nEngines, to start by hand and measure with --attach:"]
    for contender in config.contenders:
        parts.append(f"\n# {contender.key}: {contender.label}")
        parts += _engine_commands(config, contender, places)
    return "\n".join(parts)


def _engine_commands(config: BenchConfig, contender: Contender, places: Places) -> list[str]:
    model = Model(config.model, config.model)
    plan = lineup(config, contender, model, places, Path("/tmp/kvbaton-bench"), {})
    commands = []
    for spec in plan.engines:
        variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(spec.environment.items()))
        commands.append(f"{variables} python {shlex.join(spec.argv[1:])}")
    return commands
