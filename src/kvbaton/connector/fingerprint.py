"""Fingerprint: everything two engines must agree on before one reads the other's KV, as words people configure it by."""

import hashlib
import json
from typing import Any, Final

_NOT_THE_MODEL: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)


def fingerprint(vllm_config: Any) -> dict[str, str]:
    """Describe an engine.

    Block sizes, groups and bytes per block are in the layout, which is compared separately. vLLM's version is not compared: what
    matters of it shows in these fields and in the layout.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    served = model.served_model_name
    return {
        "model name": str(served[0] if isinstance(served, list | tuple) else served),
        "model configuration": _hash(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "KV cache dtype": str(cache.cache_dtype),
        "KV cache layout": _layout_name(cache),
        "tensor parallel size": str(parallel.tensor_parallel_size),
        "device": str(getattr(vllm_config.device_config, "device_type", "")),
        "speculative decoding": _speculative(vllm_config.speculative_config),
    }


def _hash(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _layout_name(cache_config: Any) -> str:
    resolved = getattr(cache_config, "get_resolved_kv_cache_layout", None)
    return str(resolved().name) if resolved is not None else "HND"


def _speculative(config: Any) -> str:
    if config is None:
        return "none"
    return f"{config.method}, {config.num_speculative_tokens} tokens"
