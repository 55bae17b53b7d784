"""Hooks: the sums engines write about their connector hooks, read back and subtracted around a cell."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvbaton.workload.record import HookTime


class Sums(NamedTuple):
    """Totals of one hook since its engine started."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    amount: int = 0


HookKey = tuple[str, str, str]
"""Engine, side, hook."""


def read_hooks(folder_by_engine: Mapping[str, Path]) -> dict[HookKey, Sums]:
    """Read what every process of every engine has written so far; ranks of one engine are added up."""
    found: dict[HookKey, Sums] = {}
    for engine, folder in folder_by_engine.items():
        for path in sorted(folder.glob("*.json")):
            for side, hook, calls, wall_s, cpu_s, amount in json.loads(path.read_text(encoding="utf-8")):
                old = found.get((engine, side, hook), Sums())
                found[engine, side, hook] = Sums(
                    old.calls + int(calls), old.wall_s + wall_s, old.cpu_s + cpu_s, old.amount + int(amount)
                )
    return found


def hooks_between(before: Mapping[HookKey, Sums], after: Mapping[HookKey, Sums]) -> list[HookTime]:
    """What was added between two readings, hooks that were not called left out."""
    rows = []
    for key, new in sorted(after.items()):
        old = before.get(key, Sums())
        if new.calls > old.calls:
            rows.append(
                HookTime(
                    *key,
                    calls=new.calls - old.calls,
                    wall_s=new.wall_s - old.wall_s,
                    cpu_s=new.cpu_s - old.cpu_s,
                    amount=new.amount - old.amount,
                )
            )
    return rows
