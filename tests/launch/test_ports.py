"""Ports: free means that a server could listen there."""

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.launch.ports import bound, consecutive_ports, free_ports, is_free, router_port

HOST = "127.0.0.1"


def test_free_ports_are_distinct_and_free() -> None:
    ports = list(free_ports(HOST, 20))

    assert len(set(ports)) == 20
    assert all(is_free(HOST, port) for port in ports)


def test_taken_router_port_is_replaced_only_when_it_was_the_default() -> None:
    with bound(HOST, 0) as listener:
        taken = listener.getsockname()[1]

        assert router_port(HOST, taken, is_default=True) != taken
        with pytest.raises(ConfigError, match="port"):
            router_port(HOST, taken, is_default=False)


def test_router_port_zero_picks_one() -> None:
    assert router_port(HOST, 0, is_default=False) > 0


def test_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        router_port("192.0.2.1", 0, is_default=True)

    assert refused.value.key == "host"


def test_consecutive_ports_refuse_a_taken_one() -> None:
    with bound(HOST, 0) as listener:
        taken = listener.getsockname()[1]

        with pytest.raises(ConfigError, match="engine_port"):
            list(consecutive_ports(HOST, taken, 2))


def test_consecutive_ports_stop_at_the_last_one() -> None:
    with pytest.raises(ConfigError, match="65536"):
        list(consecutive_ports(HOST, 65_535, 2))
