"""What `kvbaton bench` is asked to do: one frozen value, and the presets it can start from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvbaton.base.errors import ConfigError
from kvbaton.bench.contenders import CONTENDERS, Contender, Json
from kvbaton.workload.arrivals import Arrivals
from kvbaton.workload.cells import Cell, Link


class Device(StrEnum):
    """What the engines compute on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Attached:
    """Engines of one contender that somebody else started; a plain engine has only `decode`."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One benchmark.

    Attributes:
        out: folder of records, logs and report.
        contenders: in the order they are shown.
        cells: prompt lengths at rates.
        links: between the engines; more than the unlimited one needs namespaces.
        namespaces: whether engines sit in namespaces even when no link is limited.
        output_tokens: per request.
        requests: per cell and repeat.
        unloaded_requests: sent one at a time before the cells of a prompt length.
        repeats: interleaved over contenders.
        seed: of repeat 0; later ones count up.
        arrivals: shape of the gaps.
        model: built-in name, path or hub name.
        dtype: for the timed runs.
        check_tokens: whether to compare greedy tokens in float32 first.
        overload: run cells at or above the load that counts as steady.
        device: what the engines compute on.
        prefill_on: cores or GPUs of the prefill engine.
        decode_on: cores or GPUs of the decode engine.
        chunk_tokens: prompt tokens per prefill step.
        block_tokens: tokens per KV block.
        kv_cache_gib: per engine, on cpu.
        max_model_len: None: what the longest request needs.
        prefix_caching: off by default, so that every prompt is computed.
        ucx_tls: UCX_TLS of the engines.
        engine_args: handed to vLLM.
        common: connector settings of every contender, such as NIXL's backends.
        attached: engines already running, by contender.
        client_nice: niceness of the load generator.
        ready_timeout_s: for a boot.
    """

    out: Path
    contenders: tuple[Contender, ...] = tuple(CONTENDERS.values())
    cells: tuple[Cell, ...] = (Cell(2048, 0.4), Cell(4096, 0.2))
    links: tuple[Link, ...] = (Link(),)
    namespaces: bool = False
    output_tokens: int = 16
    requests: int = 10
    unloaded_requests: int = 3
    repeats: int = 3
    seed: int = 20_261_001
    arrivals: Arrivals = Arrivals.POISSON
    model: str = "tiny"
    dtype: str = "bfloat16"
    check_tokens: bool = True
    overload: bool = False
    device: Device = Device.CPU
    prefill_on: str = "0"
    decode_on: str = "1"
    chunk_tokens: int = 1024
    block_tokens: int = 128
    kv_cache_gib: int = 1
    max_model_len: int | None = None
    prefix_caching: bool = False
    ucx_tls: str | None = "tcp"
    engine_args: tuple[str, ...] = ()
    common: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    attached: Mapping[str, Attached] = field(default_factory=lambda: MappingProxyType({}))
    client_nice: int = 5
    ready_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what could not be measured."""
        for key in (
            "output_tokens", "requests", "unloaded_requests", "repeats", "chunk_tokens", "block_tokens", "kv_cache_gib",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise ConfigError(f"--{key.replace('_', '-')}", getattr(self, key), "at least 1")
        if not self.ready_timeout_s > 0:
            raise ConfigError("--ready-timeout-s", self.ready_timeout_s, "more than 0")
        if not 0 <= self.client_nice <= 19:
            raise ConfigError("--client-nice", self.client_nice, "0 to 19")
        if not (self.contenders and self.cells and self.links):
            raise ConfigError("--contenders/--cells/--link", None, "at least one of each")
        for key, values in (("--cells", self.cells), ("--link", self.links)):
            if len(set(values)) != len(values):
                raise ConfigError(key, [value.name for value in values], "each at most once")
        if self.attached and any(link.bits_per_s for link in self.links):
            raise ConfigError("--link", "limited", "none, as attached engines have the link they have")
        if self.attached and {one.key for one in self.contenders} != set(self.attached):
            raise ConfigError("--attach", sorted(self.attached), "one for every contender that is measured")
        self._check_lengths()

    def _check_lengths(self) -> None:
        longest = max(cell.prompt_tokens for cell in self.cells) + self.output_tokens
        if self.max_model_len is not None and self.max_model_len < longest:
            raise ConfigError("--max-model-len", self.max_model_len, f"at least {longest} for these cells")

    @property
    def model_len(self) -> int:
        """Tokens an engine must take: the longest request, with room for a tokenizer that makes a few more."""
        longest = max(cell.prompt_tokens for cell in self.cells) + self.output_tokens
        return self.max_model_len or longest + 256

    @property
    def wants_namespaces(self) -> bool:
        """Whether the engines should sit in network namespaces."""
        return not self.attached and (self.namespaces or any(link.bits_per_s for link in self.links))

    def settings(self) -> dict[str, str]:
        """What results must share to be put into one table."""
        keys = (
            "model", "dtype", "output_tokens", "seed", "arrivals", "device", "prefill_on", "decode_on", "chunk_tokens",
            "block_tokens", "prefix_caching", "ucx_tls", "engine_args", "requests", "common",
        )  # fmt: skip
        return {key: str(getattr(self, key)) for key in keys if key != "common" or self.common}


PRESETS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "cpu-2core": MappingProxyType(
            {
                "cells": "2048@0.4,2048@0.8,4096@0.2,4096@0.4",
                "link": "none,400mbit,200mbit",
                "output_tokens": 16,
                "requests": 10,
                "repeats": 3,
                "dtype": "bfloat16",
            }
        ),
        "aws-2026-10": MappingProxyType(
            {
                "cells": ",".join(
                    f"{tokens}@{rate}" for tokens in (1024, 2048, 4096, 8192, 16384) for rate in (1, 2, 4, 8)
                ),
                "link": "none",
                "output_tokens": 128,
                "requests": 200,
                "repeats": 3,
                "dtype": "bfloat16",
                "device": "cuda",
                "overload": True,
            }
        ),
    }
)
"""Values by flag; a flag given beside a preset wins."""
