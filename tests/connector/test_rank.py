"""What a rank decides before its courier starts."""

from types import SimpleNamespace

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.connector.config import parse_settings
from kvbaton.connector.rank import allows_tail


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [({}, True), ({"layer_tail": True}, True), ({"layer_tail": False}, False), ({"stream": False}, False)],
)
def test_layer_tail_is_as_set(settings, allowed):
    assert allows_tail(parse_settings(settings), SimpleNamespace(use_ubatching=False)) == allowed


def test_no_layer_tail_where_a_layer_is_called_once_per_microbatch():
    parallel = SimpleNamespace(use_ubatching=True)

    assert not allows_tail(parse_settings({}), parallel)
    with pytest.raises(ConfigError, match="microbatches"):
        allows_tail(parse_settings({"layer_tail": True}), parallel)
