"""Flags, presets and what they refuse."""

import argparse
from pathlib import Path

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.bench.arguments import add_arguments, config_from
from kvbaton.bench.config import PRESETS, Attached, BenchConfig, Device
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.workload.cells import Cell, Link


def parse(*words: str) -> BenchConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(words))


def test_no_flags_measure_all_contenders_on_loopback() -> None:
    config = parse()

    assert [contender.key for contender in config.contenders] == list(CONTENDERS)
    assert not config.wants_namespaces
    assert not config.prefix_caching
    assert config.ucx_tls == "tcp"


def test_flags_become_settings() -> None:
    config = parse(
        "--cells",
        "1024@1,2048@0.5",
        "--link",
        "none,400mbit",
        "--contenders",
        "ours-push,plain",
        "--out",
        "x",
    )

    assert config.cells == (Cell(1024, 1.0), Cell(2048, 0.5))
    assert config.links == (Link(), Link(4e8))
    assert [contender.key for contender in config.contenders] == ["ours-push", "plain"]
    assert config.out == Path("x")
    assert config.wants_namespaces


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_valid_benchmark(name: str) -> None:
    parse("--preset", name)


def test_aws_preset_holds_the_published_matrix() -> None:
    config = parse("--preset", "aws-2026-10")

    assert {cell.prompt_tokens for cell in config.cells} == {1024, 2048, 4096, 8192, 16384}
    assert {cell.rate_per_s for cell in config.cells} == {1, 2, 4, 8}
    assert config.output_tokens == 128
    assert config.device is Device.CUDA
    assert not config.prefix_caching
    assert config.ucx_tls is None


def test_flag_beats_preset() -> None:
    assert parse("--preset", "aws-2026-10", "--output-tokens", "8", "--cells", "512@1").output_tokens == 8


def test_attached_engines_are_the_contenders() -> None:
    config = parse("--attach", "ours-push=http://a:1,http://b:2/", "--attach", "plain=http://c:3")

    assert [contender.key for contender in config.contenders] == ["ours-push", "plain"]
    assert config.attached["ours-push"] == Attached("http://a:1", "http://b:2")
    assert config.attached["plain"] == Attached(None, "http://c:3")


@pytest.mark.parametrize(
    "words",
    [
        ("--cells", ""), ("--cells", "2048@0.4,2048@0.4"), ("--link", "slow"), ("--contenders", "nobody"),
        ("--contenders", "plain,plain"), ("--requests", "0"), ("--repeats", "-1"), ("--max-model-len", "100"),
        ("--attach", "ours-push=http://a:1"), ("--attach", "nobody=http://a:1,http://b:2"), ("--attach", "plain=ftp://a"),
        ("--attach", "plain=http://a:1", "--contenders", "plain,ours-push"),
        ("--attach", "plain=http://a:1", "--link", "400mbit"), ("--ready-timeout-s", "0"), ("--client-nice", "40"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse(*words)
