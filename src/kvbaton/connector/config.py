"""Settings of the connector: `kv_connector_extra_config` and the environment, read in this file only."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvbaton.base.errors import ConfigError
from kvbaton.protocol.mode import Mode
from kvbaton.protocol.peer import Heartbeat
from kvbaton.runtime.config import CourierConfig

_log = logging.getLogger(__name__)

DEFAULT_HOST: Final = "localhost"
DEFAULT_PORT: Final = 5600
UPSTREAM_KEYS: Final = frozenset(
    {
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_recompute_threshold",
        "push_registration_timeout",
    }
)
"""Keys of vLLM's own NIXL connectors that mean nothing here; ignored with a warning, so that swapping the name is enough."""

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Auto = Literal["auto"]


class _Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` as users write it."""

    mode: Literal["push", "pull"] = "push"
    backends: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["UCX"])
    num_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    progress_thread: bool | Auto = "auto"
    secret: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    verify: bool = False
    stream: bool | Auto = "auto"
    layer_tail: bool | Auto = "auto"
    lease_s: Seconds | None = None
    kv_lease_duration: Seconds | None = None
    park_s: Seconds = 60.0
    handoff_timeout_s: Seconds = 120.0
    heartbeat_s: Seconds = 1.0
    lost_after_s: Seconds = 3.0
    poll_min_s: Seconds = 0.0003
    poll_max_s: Seconds = 0.003
    max_in_flight: Annotated[int, Meta(ge=1, le=256)] = 2
    recompute_threshold_tokens: Annotated[int, Meta(ge=1)] = 1
    trace_file: Annotated[str, Meta(min_length=1)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=1)] | Auto = "auto"
    rest: bool = True
    peers: list[str] | None = None


@dataclass(frozen=True, slots=True)
class SideChannel:
    """Where an engine's directory listens and what it tells its peers.

    Attributes:
        host: name or address, as peers reach it.
        port: TCP port.
    """

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user can set.

    Attributes:
        mode: who posts, unless a request says otherwise.
        backends: NIXL backends.
        num_threads: NIXL threads that share large transfers.
        progress_thread: whether NIXL spins a thread of its own; None leaves it to the kind of memory.
        secret: shared secret of the side channel.
        verify: compare checksums before committing.
        stream: send while the prefill computes.
        layer_tail: send blocks layer by layer; None does so where measured costs say that it pays.
        lease_s: how long finished blocks wait for a consumer.
        park_s: how long a registration waits for its prefill.
        handoff_timeout_s: after this a waiting request fails.
        heartbeat: times of the peers.
        poll_min_s: shortest pause between the courier's polls.
        poll_max_s: longest pause between polls while a handoff is open.
        max_in_flight: WRITEs posted at once per handoff.
        recompute_threshold_tokens: with at most this many prompt tokens missing, they are computed here.
        trace_file: where ended handoffs are written down.
        wait_s: how long a step without work waits for the courier; None leaves it to the kind of memory.
        rest: this engine's processes sleep instead of spinning while they only wait for KV.
        peers: hosts ("host" or "host:port") requests may name as producer; None allows any.
    """

    mode: Mode
    backends: tuple[str, ...]
    num_threads: int
    progress_thread: bool | None
    secret: bytes | None
    verify: bool
    stream: bool
    layer_tail: bool | None
    lease_s: float
    park_s: float
    handoff_timeout_s: float
    heartbeat: Heartbeat
    poll_min_s: float
    poll_max_s: float
    max_in_flight: int
    recompute_threshold_tokens: int
    trace_file: Path | None
    wait_s: float | None
    rest: bool
    peers: frozenset[str] | None

    def courier(self, host: str) -> CourierConfig:
        """The part a courier needs."""
        return CourierConfig(
            host=host,
            secret=self.secret,
            verify=self.verify,
            stream=self.stream,
            park_s=self.park_s,
            lease_s=self.lease_s,
            max_in_flight=self.max_in_flight,
            poll_min_s=self.poll_min_s,
            poll_max_s=self.poll_max_s,
            heartbeat=self.heartbeat,
            trace_file=self.trace_file,
        )


def parse_settings(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Check `kv_connector_extra_config`.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
    """
    env = os.environ if environ is None else environ
    raw = _convert(extra)
    if raw.poll_min_s > raw.poll_max_s:
        raise ConfigError("poll_min_s", raw.poll_min_s, f"at most poll_max_s ({raw.poll_max_s:g})")
    if raw.heartbeat_s >= raw.lost_after_s:
        raise ConfigError("heartbeat_s", raw.heartbeat_s, f"less than lost_after_s ({raw.lost_after_s:g})")
    secret = raw.secret or env.get("KVBATON_SECRET") or None
    return Settings(
        mode=Mode(raw.mode),
        backends=tuple(raw.backends),
        num_threads=raw.num_threads,
        progress_thread=None if raw.progress_thread == "auto" else raw.progress_thread,
        secret=secret.encode() if secret else None,
        verify=raw.verify,
        stream=True if raw.stream == "auto" else raw.stream,
        layer_tail=None if raw.layer_tail == "auto" else raw.layer_tail,
        lease_s=raw.lease_s or raw.kv_lease_duration or 30.0,
        park_s=raw.park_s,
        handoff_timeout_s=raw.handoff_timeout_s,
        heartbeat=Heartbeat(interval_s=raw.heartbeat_s, lost_after_s=raw.lost_after_s),
        poll_min_s=raw.poll_min_s,
        poll_max_s=raw.poll_max_s,
        max_in_flight=raw.max_in_flight,
        recompute_threshold_tokens=raw.recompute_threshold_tokens,
        trace_file=Path(raw.trace_file) if raw.trace_file else None,
        wait_s=None if raw.wait_s == "auto" else raw.wait_s,
        rest=raw.rest,
        peers=None if raw.peers is None else frozenset(raw.peers),
    )


def side_channel(data_parallel_index: int, environ: Mapping[str, str] | None = None) -> SideChannel:
    """Where this engine listens: upstream's variables, one port per data-parallel engine.

    Raises:
        ConfigError: the port is not a number or out of range.
    """
    env = os.environ if environ is None else environ
    text = env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_PORT))
    try:
        port = int(text) + data_parallel_index
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise ConfigError("VLLM_NIXL_SIDE_CHANNEL_PORT", text, "a TCP port")
    return SideChannel(env.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or DEFAULT_HOST, port)


def _convert(extra: Mapping[str, Any]) -> _Extra:
    ignored = sorted(UPSTREAM_KEYS.intersection(extra))
    if ignored:
        _log.warning(
            "kv_connector_extra_config: ignoring %s, which BatonConnector does not need", ", ".join(ignored)
        )
    wanted = {key: value for key, value in extra.items() if key not in UPSTREAM_KEYS}
    for key, value in wanted.items():
        if key not in _Extra.__struct_fields__:
            raise ConfigError(key, value, f"one of the keys {', '.join(sorted(_Extra.__struct_fields__))}")
    try:
        return msgspec.convert(wanted, _Extra)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"`\$\.(\w+)", text)
        key = found.group(1) if found else "kv_connector_extra_config"
        shown = "(hidden)" if key == "secret" else wanted.get(key)
        raise ConfigError(key, shown, text.split(" - at ")[0]) from error
