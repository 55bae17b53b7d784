"""Tail: tells the courier, layer by layer, how far the running step has come."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.runtime.commands import Command, PrefillProgress, PrefillTail


class LayerTail:
    """Counts saved layers during one step.

    Owner: the worker's main thread.

    A region is final once every layer that lives in it was saved; the courier hears of leading regions only, because engines agree on
    their order. Layers whose hook never comes are swept up by the PrefillProgress that ends the step.
    """

    def __init__(
        self,
        region_by_layer: Mapping[str, int],
        pays: Callable[[int, bool], bool],
        block_bytes: Sequence[int],
        hand_over: Callable[[Sequence[Command]], None],
    ) -> None:
        """Begin with no step.

        Args:
            region_by_layer: index of the region each layer's KV lies in.
            pays: whether sending so many bytes layer by layer is worth its posts; also told whether they end a prompt.
            block_bytes: per KV cache group, bytes of one block in all regions.
            hand_over: to the courier, without waking it: it polls while a tail is open.
        """
        self._region_by_layer = region_by_layer
        self._layers_by_region = Counter(region_by_layer.values())
        self._pays = pays
        self._block_bytes = tuple(block_bytes)
        self._hand_over = hand_over
        self._running: tuple[PrefillTail, ...] = ()
        self._missing: list[int] = []
        self._num_regions = 0

    def begin(
        self, frontiers: Sequence[PrefillProgress]
    ) -> tuple[list[Command], tuple[PrefillProgress, ...]]:
        """Start a step.

        Args:
            frontiers: what will be true after its forward.
        Returns:
            What the courier must know before the forward, and the frontiers as they must be reported after it.
        """
        tails: list[PrefillTail] = []
        after: list[PrefillProgress] = []
        for frontier in frontiers:
            if not self._pays(self._num_bytes(frontier), frontier.ended):
                after.append(frontier)
                continue
            tail = PrefillTail(frontier.request_id, 0, frontier.final_tokens, frontier.ended, frontier.groups)
            tails.append(tail)
            after.append(replace(frontier, groups=tuple(_none_after(group) for group in frontier.groups)))
        self._running = tuple(replace(tail, groups=()) for tail in tails)
        if self._running:
            self._missing = [self._layers_by_region[index] for index in range(len(self._layers_by_region))]
            self._num_regions = 0
        return [*tails], tuple(after)

    def layer_saved(self, layer: str) -> None:
        """One layer's KV of this step is in the cache."""
        if not self._running:
            return
        region = self._region_by_layer.get(layer)
        if region is None:
            return
        self._missing[region] -= 1
        reached = self._num_regions
        while reached < len(self._missing) and self._missing[reached] <= 0:
            reached += 1
        if reached > self._num_regions:
            self._num_regions = reached
            self._hand_over([replace(tail, num_regions=reached) for tail in self._running])

    def end(self) -> None:
        """The forward is over."""
        self._running = ()

    def _num_bytes(self, frontier: PrefillProgress) -> int:
        """Upper bound of what the step adds: its new blocks, or one block per group where it adds none."""
        sizes = (max(1, group.ids.size) for group in frontier.groups)
        return sum(size * block for size, block in zip(sizes, self._block_bytes, strict=True))


def _none_after(group: GroupBlocks) -> GroupBlocks:
    return group_blocks(group.end, ())
