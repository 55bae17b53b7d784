"""Producing: the scheduler's side of requests whose KV is handed to a consumer."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.base.ids import HandoffKey, RequestId
from kvbaton.connector.digest import prompt_digest
from kvbaton.connector.groups import NO_BLOCK, NULL_BLOCK, CacheGroup, has_state
from kvbaton.connector.holder import BlockHolder
from kvbaton.connector.prefix import StepWrites, Tables
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.runtime.commands import (
    Command,
    PrefillAborted,
    PrefillFinished,
    PrefillPreempted,
    PrefillProgress,
    PrefillStarted,
)


@dataclass(slots=True)
class _Outgoing:
    request: Any
    key: HandoffKey
    num_tokens: int
    num_reported: list[int]
    ended: bool = False


class Producing:
    """Which requests are being prefilled for somebody else, and how far they have come.

    Owner: the scheduler's thread.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], usable: Callable[[Any], bool], holder: BlockHolder | None = None
    ) -> None:
        """Start with no requests.

        Args:
            groups: the groups that are handed off.
            usable: whether a finished request's KV is good.
            holder: of sliding-window blocks.
        """
        self._groups = tuple(groups)
        self._stateful = has_state(groups)
        self._usable = usable
        self.holder = holder or BlockHolder()
        self._outgoing: dict[RequestId, _Outgoing] = {}
        self._held: set[RequestId] = set()
        self.commands: list[Command] = []
        self.preempted: list[RequestId] = []

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def num_held(self) -> int:
        """Finished requests whose blocks wait for their consumer."""
        return len(self._held)

    def add(self, request: Any, key: HandoffKey) -> None:
        """A request arrived. The courier hears of it at once, so that an early registration finds it."""
        request_id = RequestId(request.request_id)
        digest = prompt_digest(request)
        num_tokens = int(request.num_prompt_tokens)
        if self._stateful:
            _leave_out_last_token(request)
        self._outgoing[request_id] = _Outgoing(request, key, num_tokens, [0] * len(self._groups))
        self.commands.append(PrefillStarted(request_id, key, num_tokens, digest))

    def preempt(self, request_ids: Collection[str]) -> None:
        """The scheduler took these requests' blocks."""
        for name in request_ids:
            request_id = RequestId(name)
            entry = self._outgoing.get(request_id)
            if entry is None:
                continue
            entry.num_reported = [0] * len(self._groups)
            entry.ended = False
            self.holder.release(request_id)
            self.preempted.append(request_id)
            self.commands.append(PrefillPreempted(request_id))

    def progress(
        self, request_id: RequestId, new: Tables | None, writes: StepWrites, *, whole: bool, num_new: int
    ) -> tuple[PrefillProgress | None, PrefillProgress | None]:
        """A step will compute `num_new` more tokens of a request.

        Args:
            request_id: any scheduled request.
            new: blocks that became part of it, by vLLM's group index.
            writes: which blocks the step's forward writes.
            whole: `new` is the whole table rather than an addition.
            num_new: tokens the step computes.
        Returns:
            What is true before the step if anything is (a cached prefix), and what is true after it; None twice if that is nobody's
            business.
        """
        entry = self._outgoing.get(request_id)
        if entry is None or entry.ended:
            return None, None
        request, tables, before = entry.request, new or (), None
        computed, num_prompt = int(request.num_computed_tokens), int(request.num_prompt_tokens)
        if whole:
            entry.num_reported = [0] * len(self._groups)
            num_final = writes.num_final(tables, min(computed, num_prompt - 1)) if computed else 0
            if num_final:
                cut = {group.index: num_final // group.block_tokens for group in self._groups}
                prefix = [table[: cut.get(index, 0)] for index, table in enumerate(tables)]
                tables = [table[cut.get(index, 0) :] for index, table in enumerate(tables)]
                groups = tuple(self._additions(entry, request_id, prefix))
                before = PrefillProgress(request_id, num_final, ended=False, groups=groups)
        final = min(computed + num_new, num_prompt)
        entry.ended = final >= num_prompt
        groups = tuple(self._additions(entry, request_id, tables))
        return before, PrefillProgress(request_id, final, entry.ended, groups, num_prompt - final)

    def finish(self, request: Any, tables: Tables) -> HandoffKey | None:
        """A request ended.

        Returns:
            The handoff, if its blocks are kept for a consumer.
        """
        request_id = RequestId(request.request_id)
        entry = self._outgoing.pop(request_id, None)
        if entry is None:
            return None
        has_blocks = any(len(table) for table in tables)
        if has_blocks and entry.ended and self._usable(request):
            self.commands.append(PrefillFinished(request_id))
            self._held.add(request_id)
            return entry.key
        self.commands.append(PrefillAborted(request_id, entry.key, held=has_blocks))
        if has_blocks:
            self._held.add(request_id)
        else:
            self.holder.release(request_id)
        return None

    def holds(self, request_id: str) -> bool:
        """Whether a finished request's blocks are kept until the workers report it."""
        return request_id in self._held

    def sent(self, request_ids: Collection[str]) -> None:
        """The workers reported these as sent."""
        for name in request_ids:
            self._held.discard(RequestId(name))
            self.holder.release(RequestId(name))

    def _additions(self, entry: _Outgoing, request_id: RequestId, new: Tables) -> Iterator[GroupBlocks]:
        for position, group in enumerate(self._groups):
            first = entry.num_reported[position]
            table = new[group.index] if new else ()
            end = first + len(table)
            if group.window_tokens is None:
                ids = [NO_BLOCK if block == NULL_BLOCK else block for block in table]
            else:
                needed = group.first_needed(entry.num_tokens)
                ids = [
                    NO_BLOCK if block == NULL_BLOCK or index < needed else block
                    for index, block in enumerate(table, first)
                ]
                # Held from the moment they exist: they are inside the last window, so they are needed to the end.
                self.holder.hold(request_id, [block for block in ids if block != NO_BLOCK])
            entry.num_reported[position] = end
            yield group_blocks(first, ids)


def _leave_out_last_token(request: Any) -> None:
    """Stop a prefill before the last prompt token: a consumer computes that one, from the state before it."""
    if request.num_prompt_tokens < 2 or request.skip_reading_prefix_cache:
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    else:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
