"""The subcommand `bench` as the command line sees it: flags here, the implementation loaded only when it runs."""

import argparse

from kvbaton.bench.arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run `kvbaton bench`."""
    from kvbaton.bench.bench import (
        run as run_bench,
    )  # HTTP and processes load only when a benchmark really starts

    return run_bench(arguments)
