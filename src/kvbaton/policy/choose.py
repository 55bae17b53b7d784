"""The choice of engines, transfer mode and dispatch for one request."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from kvbaton.policy.view import (
    EngineName,
    EngineView,
    FleetView,
    LocalReason,
    ModePreference,
    ProducerIdentity,
    RequestShape,
    TransferMode,
)


class Dispatch(StrEnum):
    """When the decode leg leaves: beside the prefill leg, or after its answer."""

    OVERLAPPED = "overlapped"
    SERIAL = "serial"


class HandoffReason(StrEnum):
    """Why a handoff goes the way it goes."""

    AS_CONFIGURED = "as_configured"
    IDENTITY_UNKNOWN = "identity_unknown"
    IDENTITY_UNSTABLE = "identity_unstable"
    ENGINE_ONLY_PULLS = "engine_only_pulls"
    ENGINE_ONLY_PUSHES = "engine_only_pushes"


class RefusalReason(StrEnum):
    """Why no engine can be given the request now."""

    NO_PREFILL = "no_prefill_engine"
    NO_DECODE = "no_decode_engine"


@dataclass(frozen=True, slots=True)
class Handoff:
    """Prefill here, decode there.

    Attributes:
        prefill: engine of the prefill leg.
        decode: engine of the decode leg.
        mode: who posts the transfer; with an unknown identity, the mode asked for.
        dispatch: when the decode leg leaves.
        reason: why so.
        identity: the producer's identity; always set when the legs overlap.
    """

    prefill: EngineName
    decode: EngineName
    mode: TransferMode
    dispatch: Dispatch
    reason: HandoffReason
    identity: ProducerIdentity | None


@dataclass(frozen=True, slots=True)
class Local:
    """The decode engine prefills for itself."""

    decode: EngineName
    reason: LocalReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing can be done now; the client may come back."""

    reason: RefusalReason


Decision = Handoff | Local | Refusal


def decide(fleet: FleetView, request: RequestShape, avoid: frozenset[EngineName] = frozenset()) -> Decision:
    """Choose engines, mode and dispatch for one request.

    Pure. The least loaded engine of each role wins; ties go round in `fleet.turn`, skewed so that over
    consecutive turns every pair of tied engines is used. A request that can be handed off is never served
    locally: without a prefill engine it is refused.

    Args:
        fleet: the engines as they are now.
        request: what is asked.
        avoid: engines that already failed this request.
    Returns:
        The decision, with its reason.
    Cost: O(engines).
    """
    decodes = _least(fleet.decode, avoid, _running)
    if not decodes:
        return Refusal(RefusalReason.NO_DECODE)
    if request.local_reason is not None:
        return Local(decodes[fleet.turn % len(decodes)].name, request.local_reason)
    prefills = _least(fleet.prefill, avoid, _queued)
    if not prefills:
        return Refusal(RefusalReason.NO_PREFILL)
    prefill = prefills[fleet.turn % len(prefills)]
    # Two equal pools walked in step would meet in the same pairs for ever; one step aside per full cycle visits all.
    cycles = fleet.turn // lcm(len(prefills), len(decodes))
    decode = decodes[(fleet.turn + cycles) % len(decodes)]
    mode, dispatch, reason = _how(prefill, fleet.preference)
    return Handoff(prefill.name, decode.name, mode, dispatch, reason, prefill.identity)


def choose_decode(fleet: FleetView) -> EngineName | None:
    """Choose a decode engine for a request that is no handoff; None if none is up. Pure."""
    decodes = _least(fleet.decode, frozenset(), _running)
    return decodes[fleet.turn % len(decodes)].name if decodes else None


def _how(prefill: EngineView, preference: ModePreference) -> tuple[TransferMode, Dispatch, HandoffReason]:
    asked = TransferMode.PULL if preference is ModePreference.PULL else TransferMode.PUSH
    identity = prefill.identity
    if identity is None:
        return asked, Dispatch.SERIAL, HandoffReason.IDENTITY_UNKNOWN
    mode, reason = asked, HandoffReason.AS_CONFIGURED
    if identity.only_mode is not None and identity.only_mode is not asked:
        mode = identity.only_mode
        if preference is not ModePreference.AUTO:
            only_pulls = mode is TransferMode.PULL
            reason = HandoffReason.ENGINE_ONLY_PULLS if only_pulls else HandoffReason.ENGINE_ONLY_PUSHES
    if mode is TransferMode.PULL:
        return mode, Dispatch.SERIAL, reason
    if not prefill.identity_stable:
        return mode, Dispatch.SERIAL, HandoffReason.IDENTITY_UNSTABLE
    return mode, Dispatch.OVERLAPPED, reason


def _least(
    engines: tuple[EngineView, ...], avoid: frozenset[EngineName], load: Callable[[EngineView], int]
) -> list[EngineView]:
    usable = [e for e in engines if e.up and e.name not in avoid]
    if not usable:
        return []
    lowest = min(load(e) for e in usable)
    return [e for e in usable if load(e) == lowest]


def _queued(engine: EngineView) -> int:
    return engine.queued_tokens


def _running(engine: EngineView) -> int:
    return engine.running_requests
