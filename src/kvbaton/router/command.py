"""The router's command line."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from kvbaton.base.errors import ConfigError
from kvbaton.policy.view import ModePreference
from kvbaton.router.config import ConnectorKind, RouterConfig, parse_engine_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the router's arguments on `parser`."""
    add = parser.add_argument
    add("--prefill", action="append", default=[], metavar="URL", help="a prefill engine; repeat for several")
    add("--decode", action="append", default=[], metavar="URL", help="a decode engine; repeat for several")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--mode",
        choices=[m.value for m in ModePreference],
        default="push",
        help="transfer mode (default: %(default)s)",
    )
    add(
        "--connector",
        choices=[k.value for k in ConnectorKind],
        default="auto",
        help="kvbaton: identities come from /metrics only; auto: else from a one-token probe (default: %(default)s)",
    )
    add("--api-key", default=None, help="key for the engines, used where a client sends no authorization")
    add(
        "--retries", type=int, default=1, help="further attempts before the first byte (default: %(default)s)"
    )
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="to the first byte (default: %(default)s)",
    )
    add(
        "--idle-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="between two pieces (default: %(default)s)",
    )
    add(
        "--connect-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="to reach an engine (default: %(default)s)",
    )
    add(
        "--health-interval",
        type=float,
        default=5.0,
        metavar="S",
        help="between checks (default: %(default)s)",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=64 * 2**20,
        metavar="N",
        help="largest request (default: %(default)s)",
    )
    add(
        "--shutdown-grace",
        type=float,
        default=30.0,
        metavar="S",
        help="for running answers (default: %(default)s)",
    )
    add("--timing-headers", action="store_true", help="add Server-Timing to answers")
    add(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="(default: %(default)s)",
    )


def config_from(args: argparse.Namespace, environment: Mapping[str, str]) -> RouterConfig:
    """Turn parsed arguments into settings; the side channel's secret comes from KVBATON_SECRET, as the engines' does.

    Raises:
        ConfigError: an argument is missing or out of range.
    """
    secret = environment.get("KVBATON_SECRET")
    return RouterConfig(
        prefill=tuple(parse_engine_url("--prefill", url) for url in args.prefill),
        decode=tuple(parse_engine_url("--decode", url) for url in args.decode),
        host=args.host,
        port=args.port,
        mode=ModePreference(args.mode),
        connector=ConnectorKind(args.connector),
        api_key=args.api_key,
        secret=secret.encode() if secret else None,
        retries=args.retries,
        request_timeout_s=args.request_timeout,
        idle_timeout_s=args.idle_timeout,
        connect_timeout_s=args.connect_timeout,
        health_interval_s=args.health_interval,
        max_body_bytes=args.max_body_bytes,
        shutdown_grace_s=args.shutdown_grace,
        timing_headers=args.timing_headers,
    )


def run(args: argparse.Namespace) -> int:
    """Run a router until it is told to stop; returns the exit status."""
    try:
        config = config_from(args, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"kvbaton router: {error}\n")
        return 2
    from kvbaton.router.server import serve_forever  # the HTTP stack loads only when a router really starts

    return serve_forever(config, args.log_level)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` and run a router."""
    parser = argparse.ArgumentParser(
        prog="kvbaton router", description="Route requests over prefill and decode engines."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))
