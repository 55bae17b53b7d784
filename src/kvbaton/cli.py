"""The command line: arguments become one call.

Every subcommand imports its implementation only when it is the one asked for, so `kvbaton --help` starts no HTTP stack.
"""

import argparse
from collections.abc import Sequence

from kvbaton import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kvbaton` command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvbaton")
    parser.add_argument("--version", action="version", version=f"kvbaton {__version__}")
    parser.parse_args(argv)
    return 0
