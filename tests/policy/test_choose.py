"""Choices are pure: same view, same decision; every decision is possible and has its reason."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.ids import EngineAddress, EngineId
from kvbaton.policy.choose import (
    Dispatch,
    Handoff,
    HandoffReason,
    Local,
    Refusal,
    RefusalReason,
    choose_decode,
    decide,
)
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
from strategies import examples

IDENTITY = ProducerIdentity(EngineAddress("10.0.0.1", 5600, EngineId("e")))
SHAPE = RequestShape(prompt_tokens=100)


def _engine(name: str, **fields: object) -> EngineView:
    return replace(EngineView(EngineName(name), up=True, identity=IDENTITY), **fields)


def _fleet(num_prefill: int = 1, num_decode: int = 1, **fields: object) -> FleetView:
    prefill = tuple(_engine(f"p{i}") for i in range(num_prefill))
    decode = tuple(_engine(f"d{i}") for i in range(num_decode))
    return replace(FleetView(prefill, decode), **fields)


engines = st.builds(
    EngineView,
    name=st.uuids().map(lambda u: EngineName(str(u))),
    up=st.booleans(),
    queued_tokens=st.integers(0, 3),
    running_requests=st.integers(0, 3),
    identity=st.none()
    | st.builds(
        ProducerIdentity, st.just(IDENTITY.address), only_mode=st.none() | st.sampled_from(TransferMode)
    ),
    identity_stable=st.booleans(),
)
fleets = st.builds(
    FleetView,
    prefill=st.lists(engines, max_size=4).map(tuple),
    decode=st.lists(engines, max_size=4).map(tuple),
    preference=st.sampled_from(ModePreference),
    turn=st.integers(0, 1000),
)
shapes = st.builds(RequestShape, st.integers(1, 10**6), st.none() | st.sampled_from(LocalReason))


@examples(100)
@given(fleets, shapes, st.data())
def test_decision_for_any_fleet_is_possible_and_least_loaded(
    fleet: FleetView, shape: RequestShape, data: st.DataObject
):
    names = [e.name for e in fleet.prefill + fleet.decode]
    avoid = frozenset(data.draw(st.sets(st.sampled_from(names)))) if names else frozenset()
    prefill = {e.name: e for e in fleet.prefill if e.up and e.name not in avoid}
    decode = {e.name: e for e in fleet.decode if e.up and e.name not in avoid}

    decision = decide(fleet, shape, avoid)

    assert decision == decide(fleet, shape, avoid)
    match decision:
        case Refusal(reason):
            assert not decode or (not prefill and shape.local_reason is None)
            assert reason is (RefusalReason.NO_PREFILL if decode else RefusalReason.NO_DECODE)
        case Local(name, reason):
            assert reason is shape.local_reason
            assert decode[name].running_requests == min(e.running_requests for e in decode.values())
        case Handoff():
            assert shape.local_reason is None
            chosen = prefill[decision.prefill]
            assert chosen.queued_tokens == min(e.queued_tokens for e in prefill.values())
            assert decode[decision.decode].running_requests == min(
                e.running_requests for e in decode.values()
            )
            assert decision.identity == chosen.identity
            if decision.dispatch is Dispatch.OVERLAPPED:
                assert decision.identity is not None
                assert chosen.identity_stable
                assert decision.mode is TransferMode.PUSH
            if decision.identity is not None and decision.identity.only_mode is not None:
                assert decision.mode is decision.identity.only_mode


@pytest.mark.parametrize("num_prefill", range(1, 6))
@pytest.mark.parametrize("num_decode", range(1, 6))
def test_ties_over_a_full_round_use_every_pair_equally(num_prefill: int, num_decode: int):
    fleet = _fleet(num_prefill, num_decode)
    rounds = 2 * num_prefill * num_decode
    pairs = Counter()
    for turn in range(rounds):
        decision = decide(replace(fleet, turn=turn), SHAPE)
        assert isinstance(decision, Handoff)
        pairs[decision.prefill, decision.decode] += 1

    assert set(pairs.values()) == {2}
    assert len(pairs) == num_prefill * num_decode


@pytest.mark.parametrize(
    ("preference", "only_mode", "stable", "expected"),
    [
        ("push", None, True, ("push", "overlapped", "as_configured")),
        ("auto", None, True, ("push", "overlapped", "as_configured")),
        ("pull", None, True, ("pull", "serial", "as_configured")),
        ("push", "pull", True, ("pull", "serial", "engine_only_pulls")),
        ("auto", "pull", True, ("pull", "serial", "as_configured")),
        ("pull", "push", True, ("push", "overlapped", "engine_only_pushes")),
        ("push", None, False, ("push", "serial", "identity_unstable")),
    ],
)
def test_mode_and_dispatch_follow_what_is_asked_and_possible(
    preference: str, only_mode: str | None, stable: bool, expected: tuple[str, str, str]
):
    identity = replace(IDENTITY, only_mode=TransferMode(only_mode) if only_mode else None)
    prefill = _engine("p", identity=identity, identity_stable=stable)
    decision = decide(FleetView((prefill,), (_engine("d"),), ModePreference(preference)), SHAPE)

    assert isinstance(decision, Handoff)
    assert (decision.mode, decision.dispatch, decision.reason) == expected


def test_unknown_identity_goes_serial():
    decision = decide(FleetView((_engine("p", identity=None),), (_engine("d"),)), SHAPE)

    assert isinstance(decision, Handoff)
    assert (decision.dispatch, decision.reason) == (Dispatch.SERIAL, HandoffReason.IDENTITY_UNKNOWN)


def test_request_without_prefill_engine_is_never_served_locally():
    fleet = FleetView((_engine("p", up=False),), (_engine("d"),))

    assert decide(fleet, SHAPE) == Refusal(RefusalReason.NO_PREFILL)
    assert not fleet.has_complete_pair()
    assert choose_decode(fleet) == "d"
    assert choose_decode(replace(fleet, decode=())) is None
