"""Network namespaces: the prefill engine in one, everything else in the other, and a link of known rate between.

What is run is planned as plain data (`plan_*`); `Namespaces` runs it and always takes it down again. Names carry our
process id, so what a killed run left behind is recognised and removed by the next.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvbaton.base.errors import KvbatonError
from kvbaton.workload.cells import Link

Command = tuple[str, ...]

PREFIX: Final = "kvbaton"
BURST_S: Final = 0.002
"""What the token bucket holds, as time at the link's rate: small against any handoff, large against a timer tick."""
MIN_BURST_BYTES: Final = 32_768
QUEUE_S: Final = 0.2
"""How long a packet may wait before it is dropped."""


class NoNamespaces(KvbatonError):
    """Network namespaces cannot be used here; says what they need."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names and addresses of one pair of namespaces."""

    prefill: str
    decode: str
    prefill_device: str
    decode_device: str
    prefill_address: str = "10.213.77.1"
    decode_address: str = "10.213.77.2"

    @classmethod
    def of(cls, pid: int) -> "Names":
        """The names a process uses; device names may have 15 characters."""
        return cls(f"{PREFIX}-p-{pid}", f"{PREFIX}-d-{pid}", f"kvbp{pid}", f"kvbd{pid}")


def plan_up(names: Names) -> list[Command]:
    """Make both namespaces and join them by a veth pair."""
    commands: list[Command] = [
        ("ip", "netns", "add", names.prefill),
        ("ip", "netns", "add", names.decode),
        (
            "ip", "-n", names.prefill, "link", "add", names.prefill_device, "type", "veth",
            "peer", "name", names.decode_device, "netns", names.decode,
        ),
    ]  # fmt: skip
    for namespace, device, address in _ends(names):
        commands += [
            ("ip", "-n", namespace, "link", "set", "lo", "up"),
            ("ip", "-n", namespace, "address", "add", f"{address}/30", "dev", device),
            ("ip", "-n", namespace, "link", "set", device, "up"),
        ]
    return commands


def plan_link(names: Names, link: Link) -> list[Command]:
    """Shape both directions, or take the shaping away."""
    commands: list[Command] = []
    for namespace, device, _ in _ends(names):
        if link.bits_per_s is None:
            commands.append(("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "noqueue"))
            continue
        bytes_per_s = link.bits_per_s / 8
        burst = max(MIN_BURST_BYTES, int(bytes_per_s * BURST_S))
        commands.append(
            (
                "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{link.bits_per_s:.0f}bit",
                "burst", str(burst), "limit", str(burst + int(bytes_per_s * QUEUE_S)),
            )
        )  # fmt: skip
    return commands


def plan_down(names: Names) -> list[Command]:
    """Remove both namespaces; the veth pair goes with them."""
    return [("ip", "netns", "delete", names.prefill), ("ip", "netns", "delete", names.decode)]


def inside(namespace: str | None, argv: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs a program in a namespace; None is our own."""
    return tuple(argv) if namespace is None else ("ip", "netns", "exec", namespace, *argv)


def stale(listed: Iterable[str], alive: Iterable[int]) -> list[str]:
    """Namespaces of ours whose makers no longer run."""
    running = set(alive)
    found = []
    for name in listed:
        prefix, _, pid = name.rpartition("-")
        if prefix in (f"{PREFIX}-p", f"{PREFIX}-d") and pid.isdigit() and int(pid) not in running:
            found.append(name)
    return found


class Namespaces:
    """One pair of namespaces that exists while the context is entered.

    Owner: the benchmark. Lifetime: `with`; leaving removes everything, however it is left.
    """

    def __init__(self, names: Names) -> None:
        self.names = names

    def __enter__(self) -> Self:
        """Make them.

        Raises:
            NoNamespaces: a tool or a right is missing; nothing is left behind.
        """
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NoNamespaces(f"`{tool}` is not installed (Debian, Ubuntu: apt-get install iproute2)")
        if os.geteuid() != 0:
            raise NoNamespaces("making network namespaces needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN)")
        self._remove_stale()
        try:
            for command in plan_up(self.names):
                _run(command)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove them."""
        self.remove()

    def shape(self, link: Link) -> None:
        """Limit the link, in both directions.

        Raises:
            NoNamespaces: the kernel refuses.
        """
        for command in plan_link(self.names, link):
            _run(command)

    def remove(self) -> None:
        """Remove what is there."""
        for command in plan_down(self.names):
            subprocess.run(command, capture_output=True, check=False)

    def _remove_stale(self) -> None:
        listed = _run(("ip", "netns", "list")).split("\n")
        alive = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        for name in stale([line.split()[0] for line in listed if line.strip()], alive):
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def _ends(names: Names) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    return (
        (names.prefill, names.prefill_device, names.prefill_address),
        (names.decode, names.decode_device, names.decode_address),
    )


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
