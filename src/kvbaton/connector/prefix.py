"""Prefix: how much of a request that starts with cached blocks is final before the step that starts it has run."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from kvbaton.connector.groups import NULL_BLOCK, CacheGroup, has_state

Tables = Sequence[Sequence[int]]


class StepWrites:
    """Which blocks one step's forward writes.

    vLLM puts a full block into its prefix cache when it schedules the block's tokens, so a request can start with blocks that another
    request of the same step has still to compute. Those are not final yet.

    Owner: the scheduler's thread. Lifetime: one step.
    """

    def __init__(self, groups: Sequence[CacheGroup], output: Any, *, reserves_ahead: bool) -> None:
        """Look at nothing yet: most steps start no request with a cached prefix.

        Args:
            groups: those that are handed off.
            output: what vLLM's scheduler decided, before it counts the step's tokens as computed.
            reserves_ahead: requests are given blocks steps before their tokens are scheduled, as with speculative decoding.
        """
        self._groups = tuple(groups)
        self._stateful = has_state(groups)
        self._output = output
        self._reserves_ahead = reserves_ahead

    def num_final(self, tables: Tables, num_computed: int) -> int:
        """Leading tokens of a starting request that are final before the forward.

        Args:
            tables: all its blocks, by vLLM's group index.
            num_computed: tokens that vLLM need not compute for it.
        Returns:
            At most `num_computed`; whole blocks of every group.
        """
        if (
            self._stateful
        ):  # a state holds all tokens up to one point, so its prefix is nothing that could be sent
            return 0
        final = num_computed
        while final:
            before = final
            for group in self._groups:
                blocks = tables[group.index][: final // group.block_tokens]
                num_safe = next((i for i, block in enumerate(blocks) if block in self._blocks), len(blocks))
                num_safe = min(num_safe, self._first_growing(group, len(blocks)))
                final = min(final, num_safe * group.block_tokens)
            if final == before:
                break
        return final

    @cached_property
    def _blocks(self) -> frozenset[int]:
        """Blocks that are new in this step and hold tokens which it computes."""
        return frozenset(self._new_blocks()) - {NULL_BLOCK}

    def _new_blocks(self) -> Iterator[int]:
        for new in self._output.scheduled_new_reqs:
            yield from self._from(new.block_ids, new.num_computed_tokens)
        cached = self._output.scheduled_cached_reqs
        for name, tables, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            yield from self._from(tables or (), computed if name in cached.resumed_req_ids else 0)

    def _from(self, tables: Tables, num_computed: int) -> Iterator[int]:
        for group in self._groups if tables else ():
            yield from tables[group.index][num_computed // group.block_tokens :]

    @cached_property
    def _growing(self) -> tuple[tuple[int, int], ...]:
        """From where to where the requests compute that go on: each may fill up blocks it has had before this step.

        Equal prefixes lie at equal places, so the place is all that must be known of those blocks.
        """
        cached, scheduled = self._output.scheduled_cached_reqs, self._output.num_scheduled_tokens
        running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return tuple(
            (computed, computed + scheduled.get(name, 0))
            for name, computed in running
            if name not in cached.resumed_req_ids
        )

    def _first_growing(self, group: CacheGroup, num_blocks: int) -> int:
        size = group.block_tokens
        firsts = (
            start // size
            for start, end in self._growing
            if end // size > start // size and (start % size or self._reserves_ahead)
        )
        return min(firsts, default=num_blocks)
