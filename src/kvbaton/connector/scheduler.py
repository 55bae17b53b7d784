"""Scheduler half: turns what vLLM's scheduler decides into what the workers' couriers must do.

Push and pull, prefill and decode are values on a request; this half serves them all on any engine.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from kvbaton.base.ids import RequestId
from kvbaton.connector.consuming import Consuming
from kvbaton.connector.groups import CacheGroup
from kvbaton.connector.metadata import BatonMetadata
from kvbaton.connector.metrics import BatonStats
from kvbaton.connector.params import Produce, Rules, Self, answer, read_intent
from kvbaton.connector.prefix import StepWrites
from kvbaton.connector.producing import Producing
from kvbaton.connector.quarantine import QuarantineNews
from kvbaton.runtime.commands import PrefillProgress

_log = logging.getLogger(__name__)

_USABLE: Final = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
_FURTHER_CHILD: Final = re.compile(r"[1-9]\d*_")


class BatonScheduler:
    """One engine's promises about KV.

    Owner: the scheduler's thread. Lifetime: the engine's.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        rules: Rules,
        about: Self,
        timeout_s: float,
        threshold_tokens: int,
        *,
        reserves_ahead: bool,
    ) -> None:
        """Start with no requests.

        Args:
            groups: those that are handed off.
            rules: what this engine does with a request's parameters.
            about: this engine, for its answers.
            timeout_s: of a handoff.
            threshold_tokens: fewer are computed here rather than loaded.
            reserves_ahead: see StepWrites.
        """
        self._groups = tuple(groups)
        self._rules = rules
        self._about = about
        self._reserves_ahead = reserves_ahead
        self.consuming = Consuming(groups, timeout_s, threshold_tokens)
        self.producing = Producing(groups, lambda request: request.status.name in _USABLE)
        self._outcomes: Counter[str] = Counter()
        self._gauges: tuple[int, ...] = ()

    def on_new_request(self, request: Any) -> None:
        """A request entered the engine."""
        intent = read_intent(request.kv_transfer_params, self._rules, request.request_id)
        if intent is None:
            self._outcomes["no_params"] += 1
        elif not isinstance(intent, Produce):
            self.consuming.add(request, intent)
        elif _FURTHER_CHILD.match(request.request_id):
            self._outcomes["child"] += 1
        else:
            self.producing.add(request, intent.key)

    def num_loadable(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Tokens that will be loaded, and whether asynchronously; free of side effects."""
        count = self.consuming.num_loadable(request, num_computed)
        return count, count > 0

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external: int) -> None:
        """The scheduler gave a request its blocks."""
        self.consuming.allocated(request, tables, num_external)

    def build(self, output: Any) -> BatonMetadata:
        """Everything the workers must know for this step; forgets it here."""
        consuming, producing = self.consuming, self.producing
        if output.preempted_req_ids:
            producing.preempt(output.preempted_req_ids)
        cached, after = self._frontiers(output) if len(producing) else ((), ())
        metadata = BatonMetadata(
            preempted=tuple(producing.preempted),
            before=(*producing.commands, *consuming.commands),
            cached=cached,
            after=after,
            refused=tuple(consuming.refused),
            num_tokens=output.total_num_scheduled_tokens,
        )
        for pending in (producing.preempted, producing.commands, consuming.commands, consuming.refused):
            pending.clear()
        return metadata

    def finished(
        self, request: Any, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, object] | None]:
        """A request ended.

        Returns:
            Whether its blocks stay until the workers report it, and what the response carries.
        """
        self.consuming.finished(request)
        request_id = RequestId(request.request_id)
        key = self.producing.finish(request, tables)
        if key is None:
            return self.producing.holds(request_id), None
        return True, answer(key, request_id, int(request.num_prompt_tokens), self._about)

    def reported(
        self, sent: Collection[str], received: Collection[str], news: QuarantineNews | None = None
    ) -> None:
        """All ranks have reported these requests; some ranks have news of blocks in quarantine."""
        if news is not None:
            self.consuming.quarantine.update(news)
        self.consuming.received(received)
        self.producing.sent(sent)

    @property
    def has_news(self) -> bool:
        """Whether the workers have not been told everything yet, so that the engine must step once more."""
        return bool(self.producing.commands or self.consuming.commands or self.consuming.refused)

    def take_stats(self) -> BatonStats | None:
        """Requests that took no handoff, by reason, since the last call, and what is held now; None if nothing changed."""
        values = (self.producing.num_held, self.consuming.num_waiting, self.consuming.quarantine.num_blocks)
        if values == self._gauges and not self._outcomes and not self.consuming.outcomes:
            return None  # as in most steps
        self._gauges = values
        counted = dict(self._outcomes + self.consuming.outcomes)
        self._outcomes.clear()
        self.consuming.outcomes.clear()
        gauges = dict(zip(("held_prefills", "waiting_requests", "quarantined_blocks"), values, strict=True))
        return BatonStats({"local": counted, "gauges": {"scheduler": gauges}})

    def _frontiers(self, output: Any) -> tuple[tuple[PrefillProgress, ...], tuple[PrefillProgress, ...]]:
        """What is true before this step's forward, and after it."""
        scheduled, running = output.num_scheduled_tokens, output.scheduled_cached_reqs
        writes = StepWrites(self._groups, output, reserves_ahead=self._reserves_ahead)
        steps = [(new.req_id, new.block_ids, True) for new in output.scheduled_new_reqs]
        steps += [
            (name, blocks, name in running.resumed_req_ids)
            for name, blocks in zip(running.req_ids, running.new_block_ids, strict=True)
        ]
        found = [
            self.producing.progress(
                RequestId(name), blocks, writes, whole=whole, num_new=scheduled.get(name, 0)
            )
            for name, blocks, whole in steps
        ]
        return (
            tuple(before for before, _ in found if before is not None),
            tuple(after for _, after in found if after is not None),
        )
