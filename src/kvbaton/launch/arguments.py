"""Flags of `kvbaton up`, one per setting of `UpConfig`."""

import argparse
import json
from pathlib import Path

from kvbaton.base.errors import ConfigError
from kvbaton.launch.config import CONNECTORS, Device, JsonValue, UpConfig, make_config, read_file
from kvbaton.protocol.mode import Mode

NOT_SETTINGS = frozenset({"command", "config", "demo", "set", "handler"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags; none has a default here, so that a flag left out does not hide the file's value."""
    add = parser.add_argument
    add("--config", type=Path, help="TOML file with these settings (names with _ instead of -)")
    add("--demo", action="store_true", help="send a few requests, show each handoff, stop")
    add("--model", help="'tiny' or 'nano' (made here, random weights), a path, or a hub name (default: tiny)")
    add("--prefill", type=int, metavar="N", help="prefill engines (default: 1)")
    add("--decode", type=int, metavar="N", help="decode engines (default: 1)")
    add("--mode", choices=[*Mode], help="push: prefill writes KV; pull: decode reads it (default: push)")
    add("--connector", choices=CONNECTORS, help="KV connector; vLLM's own two are there to compare with")
    add("--set", action="append", metavar="KEY=JSON", help="one connector setting; repeatable")
    add("--device", choices=[*Device], help="default: cpu")
    add("--dtype", help="as vLLM's --dtype (default: auto)")
    add("--max-model-len", type=int, metavar="TOKENS", help="default: 8192")
    add("--chunk-tokens", type=int, metavar="TOKENS", help="prompt tokens per prefill step (default: 1024)")
    add("--block-tokens", type=int, metavar="TOKENS", help="tokens per KV block (default: vLLM's)")
    add("--kv-cache-gib", type=int, metavar="GIB", help="KV memory per engine on cpu (default: 1)")
    add("--tensor-parallel", type=int, metavar="N", help="ranks per engine (default: 1)")
    add(
        "--cores",
        action="append",
        metavar="LIST",
        help="cores of one engine, e.g. 0-3; once per engine, prefill first",
    )
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=None, help="default: on")
    add("--enforce-eager", action=argparse.BooleanOptionalAction, default=None, help="default: on for cpu")
    add(
        "--engine-arg",
        action="append",
        dest="engine_args",
        metavar="ARG",
        help="given to vLLM, e.g. --engine-arg=--seed=1; repeatable",
    )
    add(
        "--router-arg",
        action="append",
        dest="router_args",
        metavar="ARG",
        help="given to the router; repeatable",
    )
    add("--host", help="address everything listens on (default: 127.0.0.1)")
    add(
        "--port",
        type=int,
        help="the router's port; 0 picks a free one (default: 8000, or free if it is taken)",
    )
    add("--engine-port", type=int, help="first of the engines' consecutive ports (default: free ones)")
    add("--ucx-tls", metavar="LIST", help="UCX_TLS for the engines (default: as in the environment)")
    add("--log-dir", type=Path, help="default: a new folder under the user's state folder")
    add(
        "--ready-timeout-s",
        type=float,
        metavar="SECONDS",
        help="give up on a boot after this long (default: 600)",
    )


def parse_settings(items: list[str]) -> dict[str, JsonValue]:
    """Turn KEY=JSON items into a table; a value that is not JSON is taken as text.

    Raises:
        ConfigError: an item has no `=`.
    """
    table: dict[str, JsonValue] = {}
    for item in items:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError("--set", item, "KEY=VALUE")
        try:
            table[key] = json.loads(text)
        except json.JSONDecodeError:
            table[key] = text
    return table


def config_from(arguments: argparse.Namespace) -> UpConfig:
    """Turn parsed flags, and the file they may name, into a configuration."""
    flags = {key: value for key, value in vars(arguments).items() if key not in NOT_SETTINGS}
    if arguments.set:
        flags["connector_config"] = parse_settings(arguments.set)
    file = {} if arguments.config is None else read_file(arguments.config)
    return make_config(file, flags)
