"""Command lines and environments of what one contender runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from kvbaton.bench.config import BenchConfig, Device
from kvbaton.bench.contenders import CONTENDERS, Patch
from kvbaton.bench.engines import Lineup, Model, Spec, client_spec, lineup, places_in, places_on_loopback
from kvbaton.bench.instrument import NO_PINNING, NO_PROGRESS_THREAD, PATCHES
from kvbaton.bench.namespaces import Names

CONFIG = BenchConfig(out=Path("out"))
MODEL = Model("/models/tiny", "tiny")
LOOPBACK = places_on_loopback((1001, 1002, 1003, 1004, 1005))
PAIRS = sorted(set(CONTENDERS) - {"plain"})


def made(key: str, config: BenchConfig = CONFIG, places=LOOPBACK) -> Lineup:
    return lineup(
        config, CONTENDERS[key], MODEL, places, Path("out/logs"), {"PATH": "/bin", "HTTP_PROXY": "x"}
    )


def option(spec: Spec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


@pytest.mark.parametrize("key", PAIRS)
def test_pair_loads_its_connector_through_the_instrument(key: str) -> None:
    prefill, decode = made(key).engines
    configs = [json.loads(option(spec, "--kv-transfer-config")) for spec in (prefill, decode)]

    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    assert {config["kv_connector"] for config in configs} == {CONTENDERS[key].connector}
    assert {config["kv_connector_module_path"] for config in configs} == {"kvbaton.bench.instrument"}


@pytest.mark.parametrize("key", PAIRS)
def test_pair_sits_on_a_core_each_behind_a_router_in_its_mode(key: str) -> None:
    plan = made(key)

    assert [spec.environment["VLLM_CPU_OMP_THREADS_BIND"] for spec in plan.engines] == ["0", "1"]
    assert plan.router is not None
    assert option(plan.router, "--mode") == CONTENDERS[key].mode
    assert plan.target_url == plan.router.url


def test_patches_reach_both_engines_and_are_in_the_label() -> None:
    for key in PAIRS:
        named = {spec.environment.get(PATCHES) for spec in made(key).engines}

        assert named == {",".join(CONTENDERS[key].patches) or None}
        assert ("PATCHED" in CONTENDERS[key].label) == bool(CONTENDERS[key].patches)


def test_ours_and_upstream_as_shipped_are_not_patched() -> None:
    assert {key for key in PAIRS if not CONTENDERS[key].patches} >= {
        "upstream-pull",
        "upstream-push",
        "ours-stream",
    }
    assert not [key for key in PAIRS if CONTENDERS[key].is_ours and CONTENDERS[key].patches]


def test_instrument_and_contenders_name_patches_alike() -> None:
    assert {NO_PINNING, NO_PROGRESS_THREAD} == {*Patch}


def test_plain_engine_has_all_cores_and_no_connector() -> None:
    plan = made("plain")

    assert plan.router is None
    assert plan.engines[0].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "--kv-transfer-config" not in plan.engines[0].argv
    assert plan.target_url == plan.engines[0].url


def test_contenders_differ_in_nothing_but_connector_and_routing() -> None:
    def common(spec: Spec) -> list[str]:
        words = list(spec.argv)
        at = words.index("--kv-transfer-config")
        return words[:at] + words[at + 2 :]

    assert len({tuple(common(made(key).engines[0])) for key in PAIRS}) == 1


def test_namespaces_hold_prefill_apart_from_everything_else() -> None:
    names = Names.of(7)
    plan = made("ours-push", places=places_in(names))
    namespaces = [spec.argv[3] for spec in (*plan.engines, plan.router) if spec is not None]

    assert namespaces == [names.prefill, names.decode, names.decode]
    assert plan.engines[0].environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == names.prefill_address


def test_engines_get_no_proxy() -> None:
    assert "HTTP_PROXY" not in made("ours-push").engines[0].environment


def test_gpus_are_chosen_by_number() -> None:
    config = dataclasses.replace(CONFIG, device=Device.CUDA, prefill_on="0", decode_on="1")
    environments = [spec.environment for spec in made("ours-push", config).engines]

    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "1"]
    assert all("VLLM_CPU_OMP_THREADS_BIND" not in environment for environment in environments)


def test_client_is_nice() -> None:
    argv = client_spec(None, 5, Path("out"), {}).argv

    assert argv[:3] == ("nice", "-n", "5")
