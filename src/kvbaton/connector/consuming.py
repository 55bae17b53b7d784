"""Consuming: the scheduler's side of requests whose KV comes from a producer."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvbaton.base.ids import RequestId
from kvbaton.connector.digest import prompt_digest
from kvbaton.connector.groups import NULL_BLOCK, CacheGroup
from kvbaton.connector.metadata import Refused
from kvbaton.connector.params import Consume, Refuse
from kvbaton.connector.quarantine import Quarantine
from kvbaton.kv.blocks import GroupBlocks, group_blocks
from kvbaton.kv.layout import GroupKind
from kvbaton.runtime.commands import CancelReceive, Command, DeclineTransfer, StartReceive

_CHILD = re.compile(r"(\d+)_")
"""How vLLM names the choices of one request with n > 1."""


class _Phase(Enum):
    QUEUED = auto()  # not admitted by the scheduler yet
    WAITING = auto()  # blocks allocated, the courier is filling them
    SETTLED = auto()  # received, failed, or computed here


@dataclass(slots=True)
class _Incoming:
    intent: Consume | Refuse
    child: int
    phase: _Phase = _Phase.QUEUED


class Consuming:
    """Which requests wait for KV, and what the workers must be told about them.

    Owner: the scheduler's thread.

    Of n prompt tokens at most n - 1 are loaded: the last one is always computed here, because its logits are needed. Asking for
    exactly what is used makes vLLM keep the right blocks of sliding-window groups and the right recurrent state.
    """

    def __init__(self, groups: Sequence[CacheGroup], timeout_s: float, threshold_tokens: int) -> None:
        """Start with no requests."""
        self._groups = tuple(groups)
        self._timeout_s = timeout_s
        self._threshold_tokens = threshold_tokens
        self._incoming: dict[RequestId, _Incoming] = {}
        self.commands: list[Command] = []
        self.refused: list[Refused] = []
        self.outcomes: Counter[str] = Counter()
        self.quarantine = Quarantine()

    def add(self, request: Any, intent: Consume | Refuse) -> None:
        """A request arrived."""
        found = _CHILD.match(request.request_id)
        self._incoming[RequestId(request.request_id)] = _Incoming(intent, int(found.group(1)) if found else 0)

    def num_loadable(self, request: Any, num_computed: int) -> int:
        """Tokens beyond `num_computed` that will come from elsewhere; changes nothing."""
        entry = self._incoming.get(request.request_id)
        if entry is None or entry.phase is not _Phase.QUEUED:
            return 0
        missing = int(request.num_prompt_tokens) - num_computed
        if isinstance(entry.intent, Refuse):
            return missing
        return 0 if self._reason_for_local(entry, request, missing) else missing - 1

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external: int) -> None:
        """The scheduler gave a request its blocks."""
        entry = self._incoming.get(request.request_id)
        if entry is None or entry.phase is not _Phase.QUEUED:
            return
        if num_external > 0:
            entry.phase = _Phase.WAITING
            self._start(request, entry.intent, tables, num_external)
            return
        entry.phase = _Phase.SETTLED
        reason = self._reason_for_local(entry, request, 1) or "cached"
        self.outcomes[reason] += 1
        if reason != "child":
            self._decline(entry)

    def finished(self, request: Any) -> None:
        """A request ended, for whatever reason."""
        entry = self._incoming.pop(request.request_id, None)
        if entry is None:
            return
        if entry.phase is _Phase.QUEUED and not entry.child:
            self.outcomes["not_admitted"] += 1
            self._decline(entry)
        elif entry.phase is _Phase.WAITING and isinstance(entry.intent, Consume):
            self.commands.append(CancelReceive(request.request_id))

    def received(self, request_ids: Collection[str]) -> None:
        """The workers reported these; good or bad, they never wait again."""
        for request_id in request_ids:
            self.quarantine.settled(RequestId(request_id))
            entry = self._incoming.get(RequestId(request_id))
            if entry is not None:
                entry.phase = _Phase.SETTLED

    @property
    def num_waiting(self) -> int:
        """Requests whose blocks the courier is filling."""
        return sum(entry.phase is _Phase.WAITING for entry in self._incoming.values())

    def _reason_for_local(self, entry: _Incoming, request: Any, missing: int) -> str:
        """Why this request computes its prompt here; empty if it does not."""
        if isinstance(entry.intent, Refuse):
            return "refused"
        if entry.child:
            return "child"
        sampling = request.sampling_params
        if request.skip_reading_prefix_cache or (sampling and sampling.prompt_logprobs is not None):
            return "prompt_logprobs"
        if missing <= self._threshold_tokens:
            return "cached"
        return ""

    def _start(
        self, request: Any, intent: Consume | Refuse, tables: Sequence[Sequence[int]], num_external: int
    ) -> None:
        request_id = RequestId(request.request_id)
        if isinstance(intent, Refuse):
            self.outcomes["refused"] += 1
            self.refused.append(Refused(request_id, intent.reason))
            return
        num_prompt = int(request.num_prompt_tokens)
        num_loaded = num_prompt - 1
        groups = tuple(
            missing_blocks(group, tables[group.index], num_loaded - num_external, num_loaded)
            for group in self._groups
        )
        self.quarantine.watch(request_id, [block for group in groups for block in group.ids.tolist()])
        self.commands.append(
            StartReceive(
                request_id=request_id,
                key=intent.key,
                address=intent.address,
                mode=intent.mode,
                groups=groups,
                num_tokens=num_prompt,
                digest=prompt_digest(request),
                ttl_s=self._timeout_s,
                tp_size=intent.tp_size,
            )
        )

    def _decline(self, entry: _Incoming) -> None:
        if isinstance(entry.intent, Consume):
            self.commands.append(DeclineTransfer(entry.intent.key, entry.intent.address))


def missing_blocks(group: CacheGroup, table: Sequence[int], num_local: int, num_loaded: int) -> GroupBlocks:
    """The part of a block table that must be filled.

    Args:
        group: which group the table is of.
        table: the request's blocks.
        num_local: tokens that are here already.
        num_loaded: tokens that will be here afterwards.
    """
    if group.kind is GroupKind.STATE:
        end = max(1, len(table) - group.num_scratch_blocks)
        return group_blocks(end - 1, table[end - 1 : end])
    first = num_local // group.block_tokens
    end = min(len(table), -(-num_loaded // group.block_tokens))
    while first < end and table[first] == NULL_BLOCK:
        first += 1
    return group_blocks(first, table[first:end])
