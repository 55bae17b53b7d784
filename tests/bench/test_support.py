"""Contenders the installed connector cannot be are left out, loudly."""

from pathlib import Path

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.bench.support import connector_accepts, with_supported


def config(*keys: str, **more) -> BenchConfig:
    return BenchConfig(out=Path("out"), contenders=tuple(CONTENDERS[key] for key in keys), **more)


def knows_no_tail(settings) -> bool:
    return "layer_tail" not in settings


def test_unknown_setting_that_is_off_is_not_passed() -> None:
    found, left_out = with_supported(config("ours-stream"), knows_no_tail)

    assert "layer_tail" not in found.contenders[0].settings
    assert left_out == []


def test_contender_that_needs_an_unknown_setting_is_left_out() -> None:
    found, left_out = with_supported(config("ours-stream", "ours-stream-tail", "plain"), knows_no_tail)

    assert [contender.key for contender in found.contenders] == ["ours-stream", "plain"]
    assert "ours-stream-tail" in left_out[0]


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ConfigError):
        with_supported(config("ours-stream-tail"), knows_no_tail)


def test_common_settings_reach_every_pair_and_no_plain_engine() -> None:
    found, _ = with_supported(
        config("plain", "upstream-pull", "ours-pull", common={"backends": ["UCX"]}), lambda _: True
    )

    assert [contender.settings.get("backends") for contender in found.contenders] == [None, ["UCX"], ["UCX"]]


@pytest.mark.parametrize("key", ["ours-pull", "ours-push", "ours-stream", "ours-stream-tail"])
def test_connector_of_this_tree_takes_every_contenders_settings(key: str) -> None:
    assert connector_accepts(CONTENDERS[key].settings)


def test_connector_refuses_what_it_does_not_know() -> None:
    assert not connector_accepts({"no_such_setting": True})
