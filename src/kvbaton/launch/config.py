"""What `kvbaton up` starts: one frozen value, read from flags and a short TOML file.

The file has the same names as the flags (`max_model_len = 8192`), plus one table `[connector_config]` that is handed to
the connector as it is. A flag beats the file. Everything is checked here, before any process starts.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvbaton.base.errors import ConfigError
from kvbaton.protocol.mode import Mode

JsonScalar = str | int | float | bool | None
JsonValue = JsonScalar | Sequence["JsonValue"] | Mapping[str, "JsonValue"]


class Device(StrEnum):
    """What the engines compute on."""

    CPU = "cpu"
    CUDA = "cuda"


OUR_CONNECTOR: Final = "BatonConnector"
UPSTREAM_CONNECTOR_BY_MODE: Final = MappingProxyType(
    {Mode.PULL: "NixlConnector", Mode.PUSH: "NixlPushConnector"}
)
CONNECTORS: Final = (OUR_CONNECTOR, *UPSTREAM_CONNECTOR_BY_MODE.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """A deployment on one machine: how many engines of each role, with what, and where they listen.

    A port of 0 means: pick a free one. `cores` has one entry per engine, prefill engines first, in the notation of
    VLLM_CPU_OMP_THREADS_BIND; empty means that the allowed cores are dealt out evenly.
    """

    model: str = "tiny"
    prefill: int = 1
    decode: int = 1
    mode: Mode = Mode.PUSH
    connector: str = OUR_CONNECTOR
    connector_config: Mapping[str, JsonValue] = field(default_factory=dict)
    device: Device = Device.CPU
    dtype: str = "auto"
    max_model_len: int = 8192
    chunk_tokens: int = 1024
    block_tokens: int | None = None
    kv_cache_gib: int = 1
    tensor_parallel: int = 1
    cores: tuple[str, ...] = ()
    prefix_caching: bool = True
    enforce_eager: bool | None = None
    engine_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    engine_port: int = 0
    ucx_tls: str | None = None
    log_dir: Path | None = None
    ready_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what no engine could run with."""
        for key in ("prefill", "decode", "max_model_len", "chunk_tokens", "kv_cache_gib", "tensor_parallel"):
            require_at_least(key, getattr(self, key), 1)
        if self.block_tokens is not None:
            require_at_least("block_tokens", self.block_tokens, 1)
            if self.device is Device.CPU and self.block_tokens % 32:
                raise ConfigError("block_tokens", self.block_tokens, "a multiple of 32 on cpu")
        for key in ("port", "engine_port"):
            if not 0 <= getattr(self, key) <= 65_535:
                raise ConfigError(key, getattr(self, key), "0 (pick one) to 65535")
        if self.connector not in CONNECTORS:
            raise ConfigError("connector", self.connector, f"one of {', '.join(CONNECTORS)}")
        if self.connector != OUR_CONNECTOR and self.connector != UPSTREAM_CONNECTOR_BY_MODE[self.mode]:
            fitting = next(
                mode for mode, name in UPSTREAM_CONNECTOR_BY_MODE.items() if name == self.connector
            )
            raise ConfigError(
                "mode", self.mode.value, f"{fitting.value!r}, the only one {self.connector} has"
            )
        if self.cores and len(self.cores) != self.num_engines:
            raise ConfigError("cores", list(self.cores), f"one entry per engine, {self.num_engines} in all")
        if not self.ready_timeout_s > 0:
            raise ConfigError("ready_timeout_s", self.ready_timeout_s, "more than 0")

    @property
    def num_engines(self) -> int:
        """Return how many engines of both roles there are."""
        return self.prefill + self.decode

    @property
    def eager(self) -> bool:
        """Say whether vLLM skips compilation: by default on CPU, where compiling takes longer than it saves."""
        return self.device is Device.CPU if self.enforce_eager is None else self.enforce_eager


def require_at_least(key: str, value: object, least: int) -> None:
    """Raise unless a setting is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(key, value, f"a whole number of at least {least}")


def read_file(path: Path) -> dict[str, object]:
    """Read a TOML file of settings; values are still unchecked.

    Raises:
        ConfigError: the file is missing, is not TOML, or has a name that is no setting.
    """
    try:
        raw: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", str(path), f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"a TOML file ({error})") from error
    known = {item.name for item in dataclasses.fields(UpConfig)}
    for key in raw:
        if key not in known:
            raise ConfigError(key, raw[key], f"one of the settings {', '.join(sorted(known))}")
    return raw


def make_config(file: Mapping[str, object], flags: Mapping[str, object]) -> UpConfig:
    """Merge a file's settings with flags (which win) into a checked configuration.

    Raises:
        ConfigError: a value has the wrong type or is out of range; names the setting and what is allowed.
    """
    merged = {**file, **{key: value for key, value in flags.items() if value is not None}}
    if "connector_config" in file and "connector_config" in flags and flags["connector_config"] is not None:
        merged["connector_config"] = {
            **as_table("connector_config", file["connector_config"]),
            **as_table("connector_config", flags["connector_config"]),
        }
    if "mode" not in merged:
        # vLLM's own connectors have one mode each, so naming the connector says which.
        fitting = (
            mode for mode, name in UPSTREAM_CONNECTOR_BY_MODE.items() if name == merged.get("connector")
        )
        merged["mode"] = next(fitting, Mode.PUSH)
    converted = {key: convert(key, value) for key, value in merged.items()}
    return UpConfig(**converted)  # type: ignore[arg-type]  # convert() has checked every value against its field


def convert(key: str, value: object) -> object:
    """Turn one raw value into the type of its setting."""
    match key:
        case "mode":
            return as_choice(key, value, Mode)
        case "device":
            return as_choice(key, value, Device)
        case "cores" | "engine_args" | "router_args":
            return as_texts(key, value)
        case "connector_config":
            return as_table(key, value)
        case "log_dir":
            return Path(as_text(key, value))
        case "prefix_caching" | "enforce_eager":
            if not isinstance(value, bool):
                raise ConfigError(key, value, "true or false")
            return value
        case "ready_timeout_s":
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(key, value, "a number of seconds")
            return float(value)
        case "model" | "connector" | "dtype" | "host" | "ucx_tls":
            return as_text(key, value)
        case _:
            require_at_least(key, value, 0)
            return value


def as_choice(key: str, value: object, choices: type[StrEnum]) -> StrEnum:
    """Turn text into a member of an enumeration."""
    try:
        return choices(as_text(key, value))
    except ValueError:
        raise ConfigError(key, value, f"one of {', '.join(choices)}") from None


def as_text(key: str, value: object) -> str:
    """Check that a value is text with something in it."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(key, value, "text that is not empty")
    return value


def as_texts(key: str, value: object) -> tuple[str, ...]:
    """Check that a value is a list of texts."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(key, value, "a list of texts")
    return tuple(as_text(key, item) for item in value)


def as_table(key: str, value: object) -> Mapping[str, JsonValue]:
    """Check that a value is a table with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(key, value, "a table of names and values")
    return value
