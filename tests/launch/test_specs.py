"""Command lines and environments, without starting anything."""

import json
from pathlib import Path

import pytest

from kvbaton.launch.config import UpConfig, make_config
from kvbaton.launch.specs import (
    ProcessSpec,
    Role,
    Seat,
    deal_cores,
    engine_spec,
    router_spec,
    seats,
    trace_path,
)

LOGS = Path("/logs")
PREFILL = Seat(Role.PREFILL, 0, 8100, 8101, "0")
DECODE = Seat(Role.DECODE, 1, 8200, 8201, "1")


def engine(config: UpConfig, seat: Seat = PREFILL, **environment: str) -> ProcessSpec:
    return engine_spec(config, seat, "/models/m", LOGS, environment)


def value_of(spec: ProcessSpec, flag: str) -> str:
    return spec.argv[spec.argv.index(flag) + 1]


def transfer_config(spec: ProcessSpec) -> dict[str, object]:
    parsed: dict[str, object] = json.loads(value_of(spec, "--kv-transfer-config"))
    return parsed


def test_engine_roles_become_vllm_roles() -> None:
    roles = [transfer_config(engine(UpConfig(), seat))["kv_role"] for seat in (PREFILL, DECODE)]

    assert roles == ["kv_producer", "kv_consumer"]


def test_our_connector_is_told_mode_and_trace_file() -> None:
    config = make_config({"mode": "pull", "connector_config": {"verify": True}}, {})

    assert transfer_config(engine(config))["kv_connector_extra_config"] == {
        "mode": "pull",
        "trace_file": str(trace_path(LOGS, PREFILL)),
        "verify": True,
    }


def test_upstream_connector_is_told_only_what_the_user_said() -> None:
    spec = engine(make_config({"connector": "NixlConnector"}, {}))

    assert transfer_config(spec)["kv_connector_extra_config"] == {}


def test_engine_settings_reach_the_command_line() -> None:
    config = make_config({"block_tokens": 64, "prefix_caching": False, "engine_args": ["--seed", "3"]}, {})
    spec = engine(config)

    assert value_of(spec, "--block-size") == "64"
    assert "--no-enable-prefix-caching" in spec.argv
    assert "--enforce-eager" in spec.argv
    assert spec.argv[-2:] == ("--seed", "3")


def test_engine_environment_has_its_own_side_channel_and_cores() -> None:
    first, second = (engine(UpConfig(), seat).environment for seat in (PREFILL, DECODE))

    assert (first["VLLM_NIXL_SIDE_CHANNEL_PORT"], second["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("8101", "8201")
    assert (first["VLLM_CPU_OMP_THREADS_BIND"], second["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "1")
    assert "UCX_TLS" not in first


def test_cuda_engine_gets_no_cpu_settings() -> None:
    environment = engine(make_config({"device": "cuda", "ucx_tls": "rc,cuda"}, {})).environment

    assert not [name for name in environment if name.startswith("VLLM_CPU")]
    assert environment["UCX_TLS"] == "rc,cuda"


def test_proxies_are_dropped_and_the_rest_is_kept() -> None:
    environment = engine(UpConfig(), HTTPS_PROXY="http://p", http_proxy="http://p", PATH="/bin").environment

    assert environment["PATH"] == "/bin"
    assert "HTTPS_PROXY" not in environment
    assert "http_proxy" not in environment


def test_local_model_is_loaded_offline(tmp_path: Path) -> None:
    local = engine_spec(UpConfig(), PREFILL, str(tmp_path), LOGS, {})
    hub = engine_spec(UpConfig(), PREFILL, "Qwen/Qwen3-0.6B", LOGS, {})

    assert local.environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in hub.environment


def test_router_knows_every_engine_and_is_ready_on_its_own_address() -> None:
    config = UpConfig()
    spec = router_spec(config, 8000, [engine(config), engine(config, DECODE)], LOGS, {})

    assert value_of(spec, "--prefill") == "http://127.0.0.1:8100"
    assert value_of(spec, "--decode") == "http://127.0.0.1:8200"
    assert spec.health_url == "http://127.0.0.1:8000/ready"


def test_seats_number_engines_within_their_role() -> None:
    config = UpConfig(prefill=2, decode=1)
    placed = seats(config, iter(range(100, 200)), ("0", "1", "2"))

    assert [seat.name for seat in placed] == ["prefill-0", "prefill-1", "decode-0"]
    assert len({port for seat in placed for port in (seat.port, seat.side_channel_port)}) == 6


@pytest.mark.parametrize(
    ("allowed", "engines", "ranks", "expected"),
    [
        ([0, 1], 2, 1, ("0", "1")),
        ([0, 1, 2, 3], 2, 1, ("0,1", "2,3")),
        ([4, 6], 3, 1, ("4", "6", "4")),
        ([0], 2, 1, ("0", "0")),
        ([0, 1, 2, 3], 2, 2, ("0|1", "2|3")),
        ([0, 1, 2, 3, 4], 2, 1, ("0,1", "2,3")),
    ],
)
def test_cores_are_dealt_out_evenly_and_shared_when_short(
    allowed: list[int], engines: int, ranks: int, expected: tuple[str, ...]
) -> None:
    assert deal_cores(allowed, engines, ranks) == expected
