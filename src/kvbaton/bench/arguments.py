"""Flags of `kvbaton bench` and how they become a configuration."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from kvbaton.base.errors import ConfigError
from kvbaton.bench.config import PRESETS, Attached, BenchConfig, Device
from kvbaton.bench.contenders import CONTENDERS, Json, parse_contenders
from kvbaton.workload.arrivals import Arrivals
from kvbaton.workload.cells import parse_cell, parse_link

T = TypeVar("T")
NOT_SETTINGS: Final = frozenset(
    {"command", "handler", "preset", "attach", "dry_run", "report_only", "out", "set"}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; none has a default here, so that one left out does not hide a preset's value."""
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="records, logs and report; the same DIR resumes (default: bench-out)",
    )
    add("--preset", choices=sorted(PRESETS), help="start from a published or built-in set of values")
    add("--contenders", metavar="A,B", help=f"default: all of {', '.join(CONTENDERS)}")
    add(
        "--cells",
        metavar="TOKENS@RATE,...",
        help="prompt lengths at requests per second (default: 2048@0.4,4096@0.2)",
    )
    add(
        "--link",
        metavar="RATE,...",
        help="none or e.g. 400mbit; limits need root, `ip` and `tc` (default: none)",
    )
    add(
        "--namespaces",
        action="store_true",
        default=None,
        help="use network namespaces for unlimited links too",
    )
    add("--output-tokens", type=int, metavar="N", help="per request (default: 16)")
    add("--requests", type=int, metavar="N", help="per cell and repeat (default: 10)")
    add(
        "--unloaded-requests",
        type=int,
        metavar="N",
        help="one at a time, before each prompt length (default: 3)",
    )
    add("--repeats", type=int, metavar="N", help="interleaved over contenders (default: 3)")
    add("--seed", type=int, help="of prompts and arrivals (default: 20261001)")
    add("--arrivals", choices=[*Arrivals], help="shape of the gaps (default: poisson)")
    add("--model", help="'tiny' or 'nano' (made here), a path, or a hub name (default: tiny)")
    add("--dtype", help="of the timed runs (default: bfloat16)")
    add(
        "--check-tokens",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="in float32, first (default: on)",
    )
    add(
        "--overload",
        action="store_true",
        default=None,
        help="run cells with rho >= 0.9 too; they stay marked",
    )
    add("--device", choices=[*Device], help="default: cpu")
    add("--prefill-on", metavar="LIST", help="cores, or GPUs, of the prefill engine (default: 0)")
    add("--decode-on", metavar="LIST", help="cores, or GPUs, of the decode engine (default: 1)")
    add("--chunk-tokens", type=int, metavar="N", help="prompt tokens per prefill step (default: 1024)")
    add("--block-tokens", type=int, metavar="N", help="per KV block (default: 128)")
    add("--kv-cache-gib", type=int, metavar="GIB", help="per engine on cpu (default: 1)")
    add("--max-model-len", type=int, metavar="N", help="default: what the cells need")
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=None, help="default: off")
    add(
        "--ucx-tls",
        metavar="LIST",
        help="UCX_TLS of the engines; 'default' leaves it unset (default: tcp on cpu)",
    )
    add("--engine-arg", action="append", dest="engine_args", metavar="ARG", help="given to vLLM; repeatable")
    add(
        "--set",
        action="append",
        metavar="KEY=JSON",
        help="a connector setting of every contender, e.g. backends; repeatable",
    )
    add(
        "--attach",
        action="append",
        metavar="CONTENDER=PREFILL_URL,DECODE_URL",
        help="measure engines that already run, on any machines; repeatable",
    )
    add("--client-nice", type=int, metavar="N", help="niceness of the load generator (default: 5)")
    add("--ready-timeout-s", type=float, metavar="S", help="for a boot (default: 300)")
    add(
        "--dry-run",
        action="store_true",
        help="show the plan, its duration and the engines' commands, then stop",
    )
    add("--report-only", action="store_true", help="write the report of what --out holds, then stop")


def config_from(arguments: argparse.Namespace) -> BenchConfig:
    """Turn parsed flags into a configuration; a flag beats a preset, a preset beats the defaults.

    Raises:
        ConfigError: a value is malformed or out of range.
    """
    flags = {
        key: value for key, value in vars(arguments).items() if key not in NOT_SETTINGS and value is not None
    }
    values: dict[str, object] = {**PRESETS.get(arguments.preset or "", {}), **flags}
    attached = parse_attached(arguments.attach or [])
    _split(values, "cells", parse_cell)
    if "link" in values:
        values["links"] = values.pop("link")
        _split(values, "links", parse_link)
    if "contenders" in values:
        values["contenders"] = parse_contenders(str(values["contenders"]))
    elif attached:
        values["contenders"] = tuple(CONTENDERS[key] for key in attached)
    values["arrivals"] = Arrivals(str(values.get("arrivals", Arrivals.POISSON)))
    values["device"] = Device(str(values.get("device", Device.CPU)))
    if "engine_args" in values:
        values["engine_args"] = tuple(_texts(values["engine_args"]))
    if values.get("ucx_tls") == "default" or ("ucx_tls" not in values and values["device"] is Device.CUDA):
        values["ucx_tls"] = None
    values["common"] = parse_common(arguments.set or [])
    out = arguments.out or Path("bench-out")
    return BenchConfig(out=out, attached=attached, **values)  # type: ignore[arg-type]  # checked above and in __post_init__


def parse_attached(items: list[str]) -> Mapping[str, Attached]:
    """Read `CONTENDER=PREFILL_URL,DECODE_URL`; the plain engine has one URL.

    Raises:
        ConfigError: the contender is unknown or the URLs are not as many as it has engines.
    """
    found: dict[str, Attached] = {}
    for item in items:
        key, _, text = item.partition("=")
        urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
        contender = CONTENDERS.get(key)
        wanted = 1 if contender is not None and contender.connector is None else 2
        if (
            contender is None
            or len(urls) != wanted
            or not all(u.startswith(("http://", "https://")) for u in urls)
        ):
            raise ConfigError("--attach", item, "CONTENDER=PREFILL_URL,DECODE_URL (plain=URL)")
        found[key] = Attached(urls[0] if wanted == 2 else None, urls[-1])
    return MappingProxyType(found)


def parse_common(items: list[str]) -> Mapping[str, Json]:
    """Read KEY=JSON.

    Raises:
        ConfigError: it is not written like that.
    """
    found: dict[str, Json] = {}
    for item in items:
        key, separator, text = item.partition("=")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            separator = ""
        if not key or not separator:
            raise ConfigError("--set", item, 'KEY=JSON such as backends=["LIBFABRIC"]')
    return MappingProxyType(found)


def _split(values: dict[str, object], key: str, parse: Callable[[str], T]) -> None:
    if key in values:
        values[key] = tuple(parse(item) for item in str(values[key]).split(","))


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
