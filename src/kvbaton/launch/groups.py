"""Process groups: signalling one, and telling whether anything in it still runs."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

POLL_S: Final = 0.1
PROC: Final = Path("/proc")
DEAD_STATES: Final = frozenset({"Z", "X"})


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal every member of a group; a group that is gone is fine."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def group_runs(group: int) -> bool:
    """Say whether a group has a member that is not a zombie.

    `killpg(group, 0)` also counts zombies, and in a container whose first process reaps nothing they stay for ever.
    """
    return any(members_of(group))


def members_of(group: int) -> list[int]:
    """Return the process ids of a group's members, zombies left out."""
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The second field is the command in parentheses and may itself contain any character.
        state, _parent, process_group = text.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in DEAD_STATES:
            found.append(int(entry.name))
    return found


def stop_groups(groups: Iterable[int], grace_s: float, wait: Callable[[float], object] | None = None) -> None:
    """Terminate groups, wait for them up to a grace period, then kill what remains.

    Args:
        groups: process group ids.
        grace_s: how long they may take to end by themselves.
        wait: called with seconds between two looks; by default a wait on an event nobody sets.
    """
    wait = threading.Event().wait if wait is None else wait
    running = {group for group in groups if group_runs(group)}
    for group in running:
        signal_group(group, signal.SIGTERM)
    waited_s = 0.0
    while running and waited_s < grace_s:
        wait(POLL_S)
        waited_s += POLL_S
        running = {group for group in running if group_runs(group)}
    for group in running:
        signal_group(group, signal.SIGKILL)
