"""Support: which contenders the installed connector can be, asked of the connector itself."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from kvbaton.base.errors import ConfigError
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import Contender, Json

Settings = Mapping[str, Json]
OPTIONAL: Final = ("layer_tail",)
"""Settings a connector may not know yet; False is what it does anyway then."""
TRY_SETTINGS: Final = "import json, sys; from kvbaton.connector.config import parse_settings; parse_settings(json.loads(sys.argv[1]), {})"


def with_supported(
    config: BenchConfig, accepts: Callable[[Settings], bool] | None = None
) -> tuple[BenchConfig, list[str]]:
    """Drop contenders whose settings the connector does not know, and say so.

    Raises:
        ConfigError: none is left.
    """
    accepts = connector_accepts if accepts is None else accepts
    kept: list[Contender] = []
    left_out: list[str] = []
    for contender in with_common(config):
        found = _fitting(contender, accepts) if contender.is_ours and not config.attached else contender
        if found is None:
            left_out.append(
                f"leaving out {contender.key}: this connector does not know {dict(contender.settings)}"
            )
        else:
            kept.append(found)
    if not kept:
        raise ConfigError(
            "--contenders", [one.key for one in config.contenders], "one that this connector can be"
        )
    return dataclasses.replace(config, contenders=tuple(kept)), left_out


def with_common(config: BenchConfig) -> list[Contender]:
    """Contenders with the settings that all of them share added to their own."""
    return [
        dataclasses.replace(contender, settings={**contender.settings, **config.common})
        if contender.connector is not None
        else contender
        for contender in config.contenders
    ]


def connector_accepts(settings: Settings) -> bool:
    """Whether the connector takes these settings; asked in a process of its own, so nothing of it is loaded here."""
    argv = [sys.executable, "-c", TRY_SETTINGS, json.dumps(dict(settings))]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _fitting(contender: Contender, accepts: Callable[[Settings], bool]) -> Contender | None:
    if accepts(contender.settings):
        return contender
    fewer = {key: value for key, value in contender.settings.items() if key not in OPTIONAL or value}
    if len(fewer) < len(contender.settings) and accepts(fewer):
        return dataclasses.replace(contender, settings=fewer)
    return None
