import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvbaton.base.errors import ConfigError
from kvbaton.connector import compat, plugin
from kvbaton.connector.facade import BatonConnector


def config(**parallel):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu"),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def test_connector_loads_by_module_path():
    assert importlib.import_module("kvbaton.connector").BatonConnector is BatonConnector


def test_connector_package_loads_no_engine():
    code = "import sys, kvbaton.connector, kvbaton.connector.plugin; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plugin_registers_the_name_however_often_it_is_called():
    plugin.register()
    plugin.register()

    assert KVConnectorFactory.get_connector_class_by_name("BatonConnector") is BatonConnector


def test_connector_overrides_only_hooks_that_exist():
    own = {
        name
        for name, value in vars(BatonConnector).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod))
    }
    allowed = set(dir(KVConnectorBase_V1)) | {"request_finished_all_groups"}

    assert own <= allowed | {"get_loaded_kv_cache_group_ids"}
    assert supports_hma(BatonConnector)
    assert not BatonConnector.__abstractmethods__


def test_this_vllm_has_every_hook_we_need():
    compat.require_hooks(KVConnectorBase_V1)


def test_vllm_without_a_hook_is_refused_and_the_hook_named():
    class Old:
        def __init__(self, kv_cache_config: object) -> None: ...

    with pytest.raises(ConfigError) as caught:
        compat.require_hooks(Old)

    assert "get_transfer_results" in str(caught.value)


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_combination_that_cannot_work_is_refused_by_name(key: str):
    with pytest.raises(ConfigError) as caught:
        compat.require_supported(config(**{key: 2}))

    assert caught.value.key == key


def test_staging_buffer_is_refused():
    wanted = config()
    wanted.kv_transfer_config.kv_buffer_device = "cuda"

    with pytest.raises(ConfigError) as caught:
        compat.require_supported(wanted)

    assert caught.value.key == "kv_buffer_device"


@pytest.mark.parametrize(("use_mla", "layout"), [(True, None), (False, "LBHNC")])
def test_required_layout_has_contiguous_blocks(use_mla: bool, layout: str | None):
    wanted = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))

    assert BatonConnector.get_required_kvcache_layout(wanted) == layout
