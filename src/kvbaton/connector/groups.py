"""Groups: vLLM's KV cache groups in our words, as scheduler and worker both need them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.base.errors import ConfigError
from kvbaton.kv.layout import Group, GroupKind

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that a request no longer (or never) has."""

NO_BLOCK = -1
"""What we report in its place: outside every pool, so geometry refuses to move it."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group that takes part in transfers.

    Attributes:
        index: its index among all of vLLM's groups.
        kind: when its blocks are final.
        block_tokens: tokens per block.
        window_tokens: how far back attention reaches; None for all the way.
        num_scratch_blocks: speculative slots at the end of a state group's table.
        layers: names of its layers.
    """

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None = None
    num_scratch_blocks: int = 0
    layers: tuple[str, ...] = ()

    @property
    def geometry(self) -> Group:
        """What geometry needs to know."""
        return Group(self.kind, self.block_tokens)

    def first_needed(self, num_tokens: int) -> int:
        """Index of the first block that computing the last prompt token reads."""
        if self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens) // self.block_tokens


def transfer_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The groups whose blocks are handed off.

    Raises:
        ConfigError: a kind of cache that cannot be handed off.
    """
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(_group(index, groups[index]) for index in (range(len(groups)) if ids is None else ids))


def has_state(groups: Sequence[CacheGroup]) -> bool:
    """Whether any group holds recurrent state."""
    return any(group.kind is GroupKind.STATE for group in groups)


def spec_of(group: Any, layer: str) -> Any:
    """The cache spec of one layer; groups of one type but several shapes keep one each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return per_layer[layer] if per_layer else group.kv_cache_spec


def _group(index: int, group: Any) -> CacheGroup:
    spec = spec_of(group, group.layer_names[0])
    names = {cls.__name__ for cls in type(spec).__mro__}
    layers = tuple(group.layer_names)
    if getattr(group, "host_resident", False) or "CrossAttentionSpec" in names:
        raise ConfigError("model", type(spec).__name__, "a decoder whose KV cache lies on one device")
    if "MambaSpec" in names:
        if getattr(spec, "mamba_cache_mode", "none") != "none":
            raise ConfigError(
                "mamba_cache_mode",
                spec.mamba_cache_mode,
                "'none' (start vLLM with --no-enable-prefix-caching): states at block boundaries cannot be handed off",
            )
        return CacheGroup(
            index,
            GroupKind.STATE,
            spec.block_size,
            num_scratch_blocks=getattr(spec, "num_speculative_blocks", 0),
            layers=layers,
        )
    if "AttentionSpec" not in names:
        raise ConfigError(
            "model", type(spec).__name__, "attention, sliding-window attention, MLA or Mamba layers"
        )
    window = None
    if "SlidingWindowSpec" in names:
        window = spec.sliding_window
    elif "ChunkedLocalAttentionSpec" in names:
        window = spec.attention_chunk_size
    return CacheGroup(index, GroupKind.ATTENTION, spec.block_size, window, layers=layers)
