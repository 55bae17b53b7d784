"""Settings of `kvbaton up`: where they come from, which win, and what is refused in which words."""

import argparse
from pathlib import Path

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.launch.arguments import add_arguments, config_from
from kvbaton.launch.config import Device, UpConfig, make_config
from kvbaton.protocol.mode import Mode


def parse(*argv: str) -> UpConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(argv))


def write(folder: Path, text: str) -> str:
    path = folder / "up.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_no_flags_give_the_defaults() -> None:
    assert parse() == UpConfig()


def test_every_setting_has_a_flag_that_reaches_it() -> None:
    config = parse(
        *[
            "--model",
            "nano",
            "--prefill",
            "2",
            "--decode",
            "3",
            "--mode",
            "pull",
            "--dtype",
            "float32",
            "--max-model-len",
            "4096",
        ],
        *[
            "--chunk-tokens",
            "512",
            "--block-tokens",
            "64",
            "--kv-cache-gib",
            "2",
            "--tensor-parallel",
            "1",
            "--port",
            "9000",
        ],
        *[
            "--engine-port",
            "9100",
            "--ucx-tls",
            "tcp",
            "--log-dir",
            "/logs",
            "--ready-timeout-s",
            "9",
            "--host",
            "127.0.0.2",
        ],
        *[
            "--no-prefix-caching",
            "--no-enforce-eager",
            "--set",
            "verify=true",
            "--set",
            "secret=x",
            "--device",
            "cuda",
        ],
        *["--cores", "0", "--cores", "1", "--cores", "2", "--cores", "3", "--cores", "4"],
        "--engine-arg=--seed=1",
        "--router-arg=--retries=2",
    )

    assert config == UpConfig(
        model="nano",
        prefill=2,
        decode=3,
        mode=Mode.PULL,
        connector_config={"verify": True, "secret": "x"},
        device=Device.CUDA,
        dtype="float32",
        max_model_len=4096,
        chunk_tokens=512,
        block_tokens=64,
        kv_cache_gib=2,
        cores=("0", "1", "2", "3", "4"),
        prefix_caching=False,
        enforce_eager=False,
        engine_args=("--seed=1",),
        router_args=("--retries=2",),
        host="127.0.0.2",
        port=9000,
        engine_port=9100,
        ucx_tls="tcp",
        log_dir=Path("/logs"),
        ready_timeout_s=9.0,
    )


def test_flag_beats_file_and_connector_tables_merge(tmp_path: Path) -> None:
    text = 'decode = 2\nmode = "pull"\n[connector_config]\nverify = true\nlease_s = 5\n'
    config = parse("--config", write(tmp_path, text), "--decode", "4", "--set", "lease_s=7")

    assert (config.decode, config.mode) == (4, Mode.PULL)
    assert dict(config.connector_config) == {"verify": True, "lease_s": 7}


@pytest.mark.parametrize(
    ("settings", "key", "allowed"),
    [
        ({"prefill": 0}, "prefill", "at least 1"),
        ({"decode": True}, "decode", "whole number"),
        ({"mode": "shove"}, "mode", "push, pull"),
        ({"device": 3}, "device", "text"),
        ({"connector": "Other"}, "connector", "BatonConnector"),
        ({"connector": "NixlConnector", "mode": "push"}, "mode", "pull"),
        ({"cores": ["0"]}, "cores", "one entry per engine"),
        ({"cores": "0-1"}, "cores", "a list"),
        ({"block_tokens": 48}, "block_tokens", "multiple of 32"),
        ({"port": 70_000}, "port", "65535"),
        ({"ready_timeout_s": 0}, "ready_timeout_s", "more than 0"),
        ({"prefix_caching": "yes"}, "prefix_caching", "true or false"),
        ({"connector_config": 3}, "connector_config", "a table"),
        ({"model": ""}, "model", "not empty"),
    ],
)
def test_bad_setting_is_refused_by_name(settings: dict[str, object], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(settings, {})

    assert refused.value.key == key
    assert allowed in refused.value.allowed


@pytest.mark.parametrize(
    ("text", "key"),
    [("prefil = 2\n", "prefil"), ("prefill = \n", "config"), ("[connector]\nx = 1\n", "connector")],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse("--config", write(tmp_path, text))

    assert refused.value.key == key


def test_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="readable file"):
        parse("--config", "/nowhere/up.toml")


def test_upstream_connector_brings_its_mode() -> None:
    assert parse("--connector", "NixlConnector").mode is Mode.PULL
    assert parse("--connector", "NixlPushConnector").mode is Mode.PUSH


@pytest.mark.parametrize(("device", "eager"), [(Device.CPU, True), (Device.CUDA, False)])
def test_eager_follows_the_device_unless_set(device: Device, eager: bool) -> None:
    assert UpConfig(device=device).eager is eager
    assert UpConfig(device=device, enforce_eager=not eager).eager is not eager


def test_setting_without_equals_is_refused() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse("--set", "verify")
