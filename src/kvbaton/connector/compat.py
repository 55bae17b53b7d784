"""Compatibility: what this connector needs of the vLLM it finds, asked by name and signature, never by version."""

import inspect
from typing import Any, Final

from kvbaton.base.errors import ConfigError

NEEDED_HOOKS: Final = (
    "get_transfer_results",
    "handle_preemptions",
    "bind_connector_metadata",
    "wait_for_save",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "update_connector_output",
    "on_new_request",
    "build_kv_connector_stats",
    "build_prom_metrics",
)
"""Hooks without which a handoff could not fail cleanly or would not start; all are there since vLLM 0.30."""


def require_hooks(base: type) -> None:
    """Refuse a vLLM that lacks something we rely on.

    Raises:
        ConfigError: names what is missing.
    """
    missing = [name for name in NEEDED_HOOKS if not hasattr(base, name)]
    if "kv_cache_config" not in inspect.signature(base.__init__).parameters:  # type: ignore[misc]
        missing.append("a connector constructor that takes kv_cache_config")
    if missing:
        raise ConfigError("vllm", f"a version without {', '.join(missing)}", "vLLM 0.30 or newer")


def require_supported(vllm_config: Any) -> None:
    """Refuse combinations that would hang or hand off wrong KV.

    Raises:
        ConfigError: names the setting.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    for key in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        value = getattr(parallel, key, 1)
        if value != 1:
            raise ConfigError(
                key, value, "1; BatonConnector hands KV off between ranks of tensor parallelism only"
            )
    device = getattr(vllm_config.device_config, "device_type", None)
    if device and transfer.kv_buffer_device not in (None, device):
        raise ConfigError(
            "kv_buffer_device", transfer.kv_buffer_device, f"{device!r}; KV moves without a staging buffer"
        )


def required_layout(vllm_config: Any) -> str | None:
    """The KV cache layout whose blocks are contiguous, by the name this vLLM knows it by; None where any will do."""
    if vllm_config.model_config is None or vllm_config.model_config.use_mla:
        return None
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return "HND"
    return "LBHNC" if hasattr(KVCacheLayout, "LBHNC") else "HND"
