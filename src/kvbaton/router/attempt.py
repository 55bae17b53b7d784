"""One try at a handoff: two legs, raced against the client's patience, ending quiet on both sides."""

import asyncio
from dataclasses import dataclass

from kvbaton.policy.choose import Dispatch, Handoff, Local
from kvbaton.policy.view import ProducerIdentity, TransferMode
from kvbaton.router.abandoned import Abandoned
from kvbaton.router.engines import Fleet, Hold
from kvbaton.router.headers import ClientHeaders
from kvbaton.router.legs import DecodeReady, LegRequest, decode_leg, prefill_leg
from kvbaton.router.metrics import Metrics
from kvbaton.router.openai import ClientBody, Fields
from kvbaton.router.params import PrefillAnswer, prefill_params, push_params, serial_params
from kvbaton.router.patience import Patience
from kvbaton.router.timeline import AttemptTimeline
from kvbaton.router.upstream import FailureKind, LegFailure, Upstream

PrefillTask = asyncio.Task[PrefillAnswer | LegFailure]
DecodeTask = asyncio.Task[DecodeReady | LegFailure]


@dataclass(frozen=True, slots=True)
class Services:
    """What every attempt shares."""

    upstream: Upstream
    fleet: Fleet
    metrics: Metrics
    abandoned: Abandoned
    api_key: str | None


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What every attempt at one request shares.

    Attributes:
        path: endpoint with its query.
        body: parsed.
        headers: sorted out.
    """

    path: str
    body: ClientBody
    headers: ClientHeaders


class HandoffAttempt:
    """A prefill leg and a decode leg for one request.

    Owner: the task that serves the request. `run` leaves nothing behind but a `DecodeReady` it returns.
    """

    def __init__(
        self, services: Services, request: ClientRequest, decision: Handoff, timeline: AttemptTimeline
    ) -> None:
        self._services = services
        self._request = request
        self._decision = decision
        self._ids = timeline.ids
        self._timeline = timeline
        self._headers = request.headers.for_leg(timeline.ids.request_id, services.api_key)
        self._prefill_engine = services.fleet.engines[decision.prefill]
        self._decode_engine = services.fleet.engines[decision.decode]
        self._identity = decision.identity  # the producer as known so far
        self._answer: PrefillAnswer | None = None
        self._epoch = 0
        self._prefill: PrefillTask | None = None
        self._decode: DecodeTask | None = None
        self._delivered = False
        self._prefill_failed = False

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the prefill engine had cached, once it has said so."""
        return self._answer.cached_tokens if self._answer is not None else None

    async def run(self, hold: Hold, patience: Patience) -> DecodeReady | LegFailure:
        """Race the legs until the answer may be shown or the attempt has failed.

        The client sees nothing before the prefill leg succeeded *and* the decode leg began well, because an
        engine sends its response head before the KV has arrived.

        Raises:
            ClientGone, DeadlinePassed: both legs have ended by then.
        """
        try:
            self._start_prefill(hold)
            if self._decision.dispatch is Dispatch.OVERLAPPED and self._identity is not None:
                self._start_decode(self._early_params(self._identity))
            outcome = await self._race(patience)
            self._delivered = isinstance(outcome, DecodeReady)
            return outcome
        finally:
            await self._end()

    async def _race(self, patience: Patience) -> DecodeReady | LegFailure:
        while True:
            tasks: set[PrefillTask | DecodeTask] = set()
            if self._prefill is not None and self._answer is None:
                tasks.add(self._prefill)
            if self._decode is not None and not self._decode.done():
                tasks.add(self._decode)
            await patience.wait_any(tasks)
            # Prefill first: when both failed, its failure is the cause.
            if self._answer is None and self._prefill is not None and self._prefill.done():
                prefilled = self._prefill.result()
                if isinstance(prefilled, LegFailure):
                    self._prefill_failed = True
                    return prefilled
                await self._prefilled(prefilled)
            if self._decode is not None and self._decode.done():
                decoded = self._decode.result()
                if isinstance(decoded, LegFailure):
                    self._doubt_identity(decoded)
                    return decoded
                if self._answer is not None:
                    return decoded

    async def _prefilled(self, answer: PrefillAnswer) -> None:
        """Take the prefill leg's answer, and see to it that a decode leg runs with parameters that fit it."""
        self._answer = answer
        told = self._identity
        same = _same_producer(told, answer.identity)
        if answer.identity is not None and (told is None or not same):
            self._identity = answer.identity
        if self._decode is None:
            if told is None and answer.identity is not None:
                self._prefill_engine.learnt(answer.identity)
            elif not same:
                self._note_mismatch(answer.identity)
            self._start_decode(serial_params(answer, self._mode(told), self._ids.transfer_id))
        elif not same:
            # The decode leg waits at the wrong producer. It must be quiet before its successor starts: two
            # consumers of one transfer could both be written to.
            self._note_mismatch(answer.identity)
            await self._stop_decode()
            self._epoch += 1
            self._start_decode(serial_params(answer, self._mode(None), self._ids.transfer_id, self._epoch))

    def _mode(self, told: ProducerIdentity | None) -> TransferMode:
        identity = self._identity
        if told is None and identity is not None and identity.only_mode is not None:
            return identity.only_mode
        return self._decision.mode

    def _note_mismatch(self, identity: ProducerIdentity | None) -> None:
        if identity is not None:
            self._services.metrics.identity_mismatched(self._decision.prefill)
            self._prefill_engine.mismatched(identity, asyncio.get_running_loop().time())

    def _doubt_identity(self, failure: LegFailure) -> None:
        if self._answer is None and failure.kind is not FailureKind.CONNECT and failure.reply.status >= 500:
            self._prefill_engine.suspect()

    def _start_prefill(self, hold: Hold) -> None:
        body = self._request.body.prefill_leg(self._ids, prefill_params(self._ids.transfer_id))
        leg = LegRequest(self._prefill_engine, self._request.path, self._headers, body)
        self._prefill = asyncio.create_task(prefill_leg(self._services.upstream, leg, self._timeline))
        self._prefill.add_done_callback(lambda _: hold.prefill_ended())

    def _start_decode(self, params: Fields) -> None:
        body = self._request.body.decode_leg(self._ids, params)
        leg = LegRequest(self._decode_engine, self._request.path, self._headers, body)
        self._decode = asyncio.create_task(decode_leg(self._services.upstream, leg, self._timeline))

    def _early_params(self, identity: ProducerIdentity) -> Fields:
        return push_params(identity, self._ids.transfer_id, self._request.body.engine_request_id(self._ids))

    async def _stop_decode(self) -> None:
        task, self._decode = self._decode, None
        if task is not None:
            await _discard(task)

    async def _end(self) -> None:
        """Leave both engines quiet and the producer's blocks free, unless the answer was handed on."""
        if self._delivered:
            return
        for task in (self._prefill, self._decode):
            if task is not None:
                task.cancel()  # both at once; awaited below
        if self._prefill is not None:
            await _end_task(self._prefill)
        await self._stop_decode()
        # A cancelled prefill may have finished at the engine just before; releasing what is not held is harmless.
        if self._identity is not None and self._prefill is not None and not self._prefill_failed:
            self._services.abandoned.release(self._identity, self._ids.transfer_id)


class LocalAttempt:
    """A decode leg alone, for a request that cannot be handed off.

    Owner: the task that serves the request.
    """

    cached_tokens: int | None = None  # the engine's own figures are right

    def __init__(
        self, services: Services, request: ClientRequest, decision: Local, timeline: AttemptTimeline
    ) -> None:
        headers = request.headers.for_leg(timeline.ids.request_id, services.api_key)
        engine = services.fleet.engines[decision.decode]
        self._leg = LegRequest(engine, request.path, headers, request.body.local())
        self._upstream = services.upstream
        self._timeline = timeline

    async def run(self, hold: Hold, patience: Patience) -> DecodeReady | LegFailure:
        """Run the leg until its answer may be shown or it has failed.

        Raises:
            ClientGone, DeadlinePassed: the leg has ended by then.
        """
        hold.prefill_ended()  # there is none
        task = asyncio.create_task(decode_leg(self._upstream, self._leg, self._timeline))
        try:
            await patience.wait_any({task})
        except BaseException:
            await _discard(task)
            raise
        return task.result()


def _same_producer(told: ProducerIdentity | None, answered: ProducerIdentity | None) -> bool:
    if told is None or answered is None:
        return True  # an engine that does not name itself cannot contradict
    return (told.address, told.tp_size, told.pp_size, told.dcp_size) == (
        answered.address,
        answered.tp_size,
        answered.pp_size,
        answered.dcp_size,
    )


async def _end_task(task: PrefillTask | DecodeTask) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _discard(task: DecodeTask) -> None:
    """End a decode leg and close what it may have opened."""
    await _end_task(task)
    if not task.cancelled() and task.exception() is None:
        outcome = task.result()
        if isinstance(outcome, DecodeReady):
            outcome.close()
