"""The subcommand `up` as the command line sees it: flags here, the implementation loaded only when it runs."""

import argparse

from kvbaton.launch.arguments import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run `kvbaton up`."""
    from kvbaton.launch.up import run as run_up  # the HTTP stack loads only when a deployment really starts

    return run_up(arguments)
