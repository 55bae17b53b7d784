import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.connector.config import parse_settings, side_channel
from kvbaton.protocol.mode import Mode


def test_settings_of_nothing_are_the_defaults():
    settings = parse_settings({}, {})

    assert settings.mode is Mode.PUSH
    assert settings.backends == ("UCX",)
    assert settings.progress_thread is None
    assert settings.lease_s == 30
    assert settings.handoff_timeout_s == 120
    assert settings.wait_s is None
    assert settings.rest
    assert settings.peers is None


def test_settings_with_an_unknown_key_name_it_and_the_allowed_ones():
    with pytest.raises(ConfigError) as caught:
        parse_settings({"mdoe": "pull"}, {})

    assert caught.value.key == "mdoe"
    assert "mode" in caught.value.allowed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "both"),
        ("backends", []),
        ("lease_s", "soon"),
        ("lease_s", -1),
        ("max_in_flight", 0),
        ("recompute_threshold_tokens", 0),
        ("verify", "yes"),
        ("wait_s", "long"),
        ("rest", "always"),
        ("poll_min_s", 1.0),
        ("heartbeat_s", 5.0),
    ],
)
def test_settings_with_a_bad_value_name_its_key(key: str, value: object):
    with pytest.raises(ConfigError) as caught:
        parse_settings({key: value}, {})

    assert caught.value.key == key


def test_settings_never_show_a_bad_secret():
    with pytest.raises(ConfigError) as caught:
        parse_settings({"secret": 12345678}, {})

    assert "12345678" not in str(caught.value)


def test_settings_with_upstream_keys_ignore_them_with_a_warning(caplog: pytest.LogCaptureFixture):
    settings = parse_settings({"kv_lease_duration": 7, "kv_recompute_threshold": 64}, {})

    assert settings.lease_s == 7
    assert "kv_recompute_threshold" in caplog.text


def test_settings_take_the_secret_from_the_environment():
    assert parse_settings({}, {"KVBATON_SECRET": "s"}).secret == b"s"


def test_settings_prefer_the_configured_secret():
    assert parse_settings({"secret": "mine"}, {"KVBATON_SECRET": "s"}).secret == b"mine"


def test_side_channel_adds_the_data_parallel_index_to_the_port():
    channel = side_channel(
        2, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.1.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}
    )

    assert (channel.host, channel.port) == ("10.1.1.1", 7002)


@pytest.mark.parametrize("port", ["http", "70000", "0"])
def test_side_channel_with_a_bad_port_names_the_variable(port: str):
    with pytest.raises(ConfigError) as caught:
        side_channel(0, {"VLLM_NIXL_SIDE_CHANNEL_PORT": port})

    assert caught.value.key == "VLLM_NIXL_SIDE_CHANNEL_PORT"


def test_settings_reach_the_courier():
    config = parse_settings({"park_s": 5, "max_in_flight": 3, "verify": True}, {}).courier("10.1.1.1")

    assert (config.host, config.park_s, config.max_in_flight, config.verify) == ("10.1.1.1", 5, 3, True)
