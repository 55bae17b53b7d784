"""Engines as this router sees them: up or down, whom they produce for, and what is in flight there."""

import asyncio
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kvbaton.policy.choose import Handoff, Local
from kvbaton.policy.view import EngineName, EngineView, FleetView, ModePreference, ProducerIdentity, Role

MISMATCH_WINDOW_S = 60.0
UNSTABLE_MISMATCHES = 2
"""So many identity changes within the window mean several producers behind one URL, not a restart."""


class Engine:
    """One engine and this router's books on it.

    Owner: the router's event loop.
    """

    def __init__(self, name: EngineName, role: Role) -> None:
        self.name = name
        self.role = role
        self.up = False
        self.identity: ProducerIdentity | None = None
        self.several_producers = False
        self.silent_checks = 0
        self.queued_tokens = 0
        self.running_requests = 0
        self.check_wanted = asyncio.Event()
        self._mismatches_s: deque[float] = deque(maxlen=UNSTABLE_MISMATCHES)

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Engine {self.role} {self.name} {state}, {self.running_requests} running, {self.queued_tokens} queued>"

    def lost(self) -> None:
        """A connection could not be opened: take it out until a check succeeds."""
        self.up = False
        self.identity = None
        self.check_wanted.set()

    def suspect(self) -> None:
        """Something broke that a restart would explain: learn its identity anew before trusting it."""
        self.identity = None
        self.check_wanted.set()

    def learnt(self, identity: ProducerIdentity) -> None:
        """The producer behind this URL is known."""
        self.identity = identity

    def mismatched(self, identity: ProducerIdentity, now_s: float) -> None:
        """An answer named another producer than the known one: believe the answer."""
        self.identity = identity
        self._mismatches_s.append(now_s)

    def view(self, now_s: float) -> EngineView:
        """This engine, frozen."""
        recent = [at_s for at_s in self._mismatches_s if now_s - at_s < MISMATCH_WINDOW_S]
        stable = not self.several_producers and len(recent) < UNSTABLE_MISMATCHES
        return EngineView(
            self.name, self.up, self.queued_tokens, self.running_requests, self.identity, stable
        )


class Hold:
    """What one attempt occupies; given back exactly once, whatever happens.

    Lifetime: made with the decision, closed when the answer has ended. The prefill part may end earlier.
    """

    def __init__(self, prefill: Engine | None, decode: Engine, prompt_tokens: int) -> None:
        self._prefill = prefill
        self._decode: Engine | None = decode
        self._prompt_tokens = prompt_tokens
        if prefill is not None:
            prefill.queued_tokens += prompt_tokens
            prefill.running_requests += 1
        decode.running_requests += 1

    def prefill_ended(self) -> None:
        """Give the prefill part back."""
        engine, self._prefill = self._prefill, None
        if engine is not None:
            engine.queued_tokens -= self._prompt_tokens
            engine.running_requests -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prefill_ended()
        engine, self._decode = self._decode, None
        if engine is not None:
            engine.running_requests -= 1


class Fleet:
    """All engines of one router.

    Owner: the router's event loop.
    """

    def __init__(
        self, prefill: Iterable[EngineName], decode: Iterable[EngineName], mode: ModePreference
    ) -> None:
        self.engines = {name: Engine(name, Role.PREFILL) for name in prefill}
        self.engines |= {name: Engine(name, Role.DECODE) for name in decode}
        self._mode = mode
        self._turn = 0

    def view(self) -> FleetView:
        """Everything a decision may depend on, frozen."""
        now_s = asyncio.get_running_loop().time()
        by_role: dict[Role, list[EngineView]] = {Role.PREFILL: [], Role.DECODE: []}
        for engine in self.engines.values():
            by_role[engine.role].append(engine.view(now_s))
        return FleetView(tuple(by_role[Role.PREFILL]), tuple(by_role[Role.DECODE]), self._mode, self._turn)

    def hold(self, decision: Handoff | Local, prompt_tokens: int) -> Hold:
        """Book a decision; the next one sees it."""
        self._turn += 1
        prefill = self.engines[decision.prefill] if isinstance(decision, Handoff) else None
        return Hold(prefill, self.engines[decision.decode], prompt_tokens)

    def hold_decode(self, name: EngineName) -> Hold:
        """Book a decode engine for a request that is no handoff."""
        self._turn += 1
        return Hold(None, self.engines[name], 0)
