"""The command line: arguments become one call.

Every subcommand imports its implementation only when it is the one asked for, so `kvbaton --help` starts no HTTP stack.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol, cast

from kvbaton import __version__


class Implementation(Protocol):
    """What a module offers that implements a subcommand."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: where it is implemented and what it is for."""

    module: str
    summary: str


COMMANDS: Final = {
    "up": Command("kvbaton.launch.command", "start prefill and decode engines with a router on this machine"),
    "router": Command("kvbaton.router.command", "route requests over engines that already run"),
    "bench": Command(
        "kvbaton.bench.command", "measure kvbaton beside vLLM's own connectors and write a report"
    ),
    "doctor": Command("kvbaton.launch.doctor", "check this machine and say what to fix"),
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; only the chosen subcommand's arguments are filled in."""
    parser = argparse.ArgumentParser(prog="kvbaton", description="Prefill/decode disaggregation for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvbaton {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=f"{command.summary.capitalize()}.")
        if name == chosen:
            implementation = cast("Implementation", import_module(command.module))
            implementation.add_arguments(sub)
            sub.set_defaults(handler=implementation.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kvbaton` command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if word in COMMANDS), None)
    arguments = build_parser(chosen).parse_args(argv)
    handler: Callable[[argparse.Namespace], int] = arguments.handler
    return handler(arguments)
