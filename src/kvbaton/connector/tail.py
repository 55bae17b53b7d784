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
        parts: Callable[[int, bool], int],
        block_bytes: Sequence[int],
        hand_over: Callable[[Sequence[Command]], None],
    ) -> None:
        """Begin with no step.

        Args:
            region_by_layer: index of the region each layer's KV lies in.
            parts: in how many parts so many bytes should leave during a step, 1 for after it; also told whether they end a prompt.
            block_bytes: per KV cache group, bytes of one block in all regions.
            hand_over: to the courier, once the device has come so far.
        """
        self._region_by_layer = region_by_layer
        self._layers_by_region = Counter(region_by_layer.values())
        self._parts = parts
        self._block_bytes = tuple(block_bytes)
        self._hand_over = hand_over
        self._running: tuple[tuple[PrefillTail, int], ...] = ()  # and after how many regions each is news
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
        num_regions = len(self._layers_by_region)
        before: list[Command] = []
        running: list[tuple[PrefillTail, int]] = []
        after: list[PrefillProgress] = []
        for frontier in frontiers:
            num_parts = min(self._parts(self._num_bytes(frontier), frontier.ended), num_regions)
            if num_parts < 2:
                after.append(frontier)
                continue
            tail = PrefillTail(frontier.request_id, 0, frontier.final_tokens, frontier.ended, frontier.groups)
            before.append(tail)
            running.append((replace(tail, groups=()), -(-num_regions // num_parts)))
            after.append(replace(frontier, groups=tuple(_none_after(group) for group in frontier.groups)))
        self._running = tuple(running)
        if running:
            self._missing = [self._layers_by_region[index] for index in range(num_regions)]
            self._num_regions = 0
        return before, tuple(after)

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
        before, self._num_regions = self._num_regions, reached
        news = [
            replace(tail, num_regions=reached)
            for tail, stride in self._running
            if reached // stride > before // stride or before < reached == len(self._missing)
        ]
        if news:
            self._hand_over(news)

    def end(self) -> None:
        """The forward is over."""
        self._running = ()

    def _num_bytes(self, frontier: PrefillProgress) -> int:
        """Upper bound of what the step adds: its new blocks, or one block per group where it adds none."""
        sizes = (max(1, group.ids.size) for group in frontier.groups)
        return sum(size * block for size, block in zip(sizes, self._block_bytes, strict=True))


def _none_after(group: GroupBlocks) -> GroupBlocks:
    return group_blocks(group.end, ())
