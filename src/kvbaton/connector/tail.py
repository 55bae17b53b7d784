"""Tail: tells the courier, layer by layer, how far the running step has come."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.runtime.commands import Command, PrefillProgress, PrefillTail


@dataclass(slots=True)
class _Running:
    """A frontier that the running step moves.

    Attributes:
        stride: regions between two pieces of news.
        last_cut: one more follows after so many regions.
        told: there was news.
    """

    frontier: PrefillProgress
    stride: int
    last_cut: int
    told: bool = False

    def wants(self, before: int, reached: int) -> bool:
        return reached // self.stride > before // self.stride or before < self.last_cut <= reached

    def reach(self, num_regions: int) -> PrefillTail:
        frontier = self.frontier
        groups = () if self.told else frontier.groups
        self.told = True
        return PrefillTail(frontier.request_id, num_regions, frontier.final_tokens, frontier.ended, groups)


class LayerTail:
    """Counts saved layers during one step.

    Owner: the worker's main thread.

    A region is final once every layer that lives in it was saved; the courier hears of leading regions only, because engines agree on
    their order. Layers whose hook never comes are swept up by the PrefillProgress that ends the step.
    """

    def __init__(
        self,
        region_by_layer: Mapping[str, int],
        parts: Callable[[int, int], int],
        block_bytes: Sequence[int],
        hand_over: Callable[[Sequence[Command]], None],
    ) -> None:
        """Begin with no step.

        Args:
            region_by_layer: index of the region each layer's KV lies in.
            parts: in how many parts so many bytes should leave during a step, 1 for after it; also told how many tokens of
                their prompt later steps compute.
            block_bytes: per KV cache group, bytes of one block in all regions.
            hand_over: to the courier, once the device has come so far.
        """
        self._region_by_layer = region_by_layer
        self._layers_by_region = Counter(region_by_layer.values())
        self._parts = parts
        self._block_bytes = tuple(block_bytes)
        self._hand_over = hand_over
        self._running: list[_Running] = []
        self._missing: list[int] = []
        self._num_regions = 0

    def begin(self, frontiers: Sequence[PrefillProgress]) -> None:
        """Start a step.

        Args:
            frontiers: what will be true after its forward.
        """
        num_regions = len(self._layers_by_region)
        running: list[_Running] = []
        for frontier in frontiers:
            num_parts = min(self._parts(self._num_bytes(frontier), frontier.tokens_left), num_regions)
            if num_parts > 1:
                stride = -(-num_regions // num_parts)
                # what stays exposed is the last part alone, so half of that is worth a part of its own
                last_cut = num_regions - (stride // 2 if frontier.ended else 0)
                running.append(_Running(frontier, stride, last_cut))
        self._running = running
        if running:
            self._missing = [self._layers_by_region[index] for index in range(num_regions)]
            self._num_regions = 0

    def layer_saved(self, layer: str) -> None:
        """One layer's KV of this step is in the cache."""
        if not self._running:
            return
        region = self._region_by_layer.get(layer)
        if region is None:
            return
        missing, before = self._missing, self._num_regions
        missing[region] -= 1
        reached = before
        while reached < len(missing) and missing[reached] <= 0:
            reached += 1
        if reached == before:
            return
        self._num_regions = reached
        is_last = reached == len(missing)
        news = [each.reach(reached) for each in self._running if is_last or each.wants(before, reached)]
        if news:
            self._hand_over(news)

    def end(self, frontiers: Sequence[PrefillProgress]) -> tuple[PrefillProgress, ...]:
        """The forward is over.

        Args:
            frontiers: those the step began with.
        Returns:
            The same as they must be reported: blocks that a layer's news named are not named again.
        """
        told = {each.frontier.request_id for each in self._running if each.told}
        self._running = []
        return tuple(
            replace(frontier, groups=tuple(_none_after(group) for group in frontier.groups))
            if frontier.request_id in told
            else frontier
            for frontier in frontiers
        )

    def _num_bytes(self, frontier: PrefillProgress) -> int:
        """Upper bound of what the step adds: its new blocks, or one block per group where it adds none."""
        sizes = (max(1, group.ids.size) for group in frontier.groups)
        return sum(size * block for size, block in zip(sizes, self._block_bytes, strict=True))


def _none_after(group: GroupBlocks) -> GroupBlocks:
    return group_blocks(group.end, ())
