from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.ids import EngineAddress, EngineId, HandoffKey, RequestId, TransferId
from kvbaton.connector.params import Consume, Produce, Refuse, Rules, Self, answer, read_intent
from kvbaton.protocol.mode import Mode
from strategies import examples

RULES = Rules(produces=True, consumes=True, mode=Mode.PUSH, peers=None)
CONSUME: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "transfer_id": "t-1",
}
NAME = "chatcmpl-mine-9bb507ec"
ABOUT = Self(EngineAddress("10.0.0.1", 5600, EngineId("prefill-1")), 1, 1, Mode.PULL)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"other": 1}])
def test_intent_of_an_ordinary_request_is_none(params: object):
    assert read_intent(params, RULES, NAME) is None


def test_intent_to_produce_keeps_the_transfer_id():
    intent = read_intent({"do_remote_decode": True, "transfer_id": "t", "remote_host": None}, RULES, NAME)

    assert intent == Produce(HandoffKey(TransferId("t")))


@pytest.mark.parametrize(
    ("name", "engine_name"),
    [
        ("mine", "cmpl-mine-0-9bb507ec"),
        ("mine", "chatcmpl-mine-9bb507ec"),
        ("mine", "resp_mine_0-9bb507ec"),
        ("mine", "0_chatcmpl-mine-9bb507ec"),
        ("job-1", "chatcmpl-job-1-9bb507ec"),
        ("a-0-12345678", "cmpl-a-0-12345678-0-9bb507ec"),
    ],
)
def test_legs_without_transfer_id_meet_by_the_request_id_they_share(name: str, engine_name: str):
    theirs = {key: value for key, value in CONSUME.items() if key != "transfer_id"}
    produced = read_intent({"do_remote_decode": True}, RULES, engine_name)
    by_router = read_intent(theirs | {"remote_request_id": name}, RULES, "chatcmpl-other-00000000")
    by_answer = read_intent(theirs | {"remote_request_id": engine_name}, RULES, "chatcmpl-other-00000000")
    stranger = read_intent({"do_remote_decode": True}, RULES, engine_name.replace(name, f"{name}x"))

    assert isinstance(produced, Produce)
    assert isinstance(by_router, Consume)
    assert isinstance(by_answer, Consume)
    assert produced.key == by_router.key == by_answer.key
    assert stranger != produced


def test_decode_leg_with_neither_transfer_nor_request_id_is_refused():
    theirs = {key: value for key, value in CONSUME.items() if key != "transfer_id"}
    intent = read_intent(theirs, RULES, "chatcmpl-other-00000000")

    assert isinstance(intent, Refuse)
    assert "transfer_id" in intent.reason


@pytest.mark.parametrize("name", ["transfer_epoch", "epoch"])
def test_intent_to_consume_reads_every_field(name: str):
    intent = read_intent(CONSUME | {"transfer_mode": "pull", name: 3}, RULES, NAME)

    assert intent == Consume(
        HandoffKey(TransferId("t-1"), 3),
        EngineAddress("10.0.0.1", 5600, EngineId("prefill-1")),
        Mode.PULL,
        tp_size=2,
        pp_size=1,
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"do_remote_decode": True},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_port": "5600"},
        {"remote_port": True},
        {"remote_host": ""},
        {"remote_host": ["10.0.0.1"]},
        {"remote_host": "a b"},
        {"remote_host": "x" * 300},
        {"remote_engine_id": 7},
        {"transfer_id": ""},
        {"transfer_id": "x" * 129},
        {"transfer_id": "line\nbreak"},
        {"transfer_id": None},
        {"transfer_mode": "shove"},
        {"tp_size": 0},
        {"transfer_epoch": -1},
        {"do_remote_prefill": "yes"},
    ],
)
def test_intent_from_nonsense_is_refused_with_a_reason(broken: dict[str, object]):
    intent = read_intent(CONSUME | broken, RULES, NAME)

    assert isinstance(intent, Refuse)
    assert intent.reason.startswith("kv_transfer_params")


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "remote_port", "transfer_id"])
def test_intent_without_a_required_key_is_refused_and_names_it(key: str):
    intent = read_intent({name: value for name, value in CONSUME.items() if name != key}, RULES, NAME)

    assert isinstance(intent, Refuse)
    assert key in intent.reason


@pytest.mark.parametrize("params", ["text", 7, [1], object()])
def test_intent_from_something_that_is_no_dict_is_refused(params: object):
    assert isinstance(read_intent(params, RULES, NAME), Refuse)


@examples(100)
@given(
    st.dictionaries(st.sampled_from(sorted(CONSUME)), st.none() | st.booleans() | st.text() | st.integers())
)
def test_intent_never_raises(params: dict[str, object]):
    read_intent(CONSUME | params, RULES, NAME)


@pytest.mark.parametrize(
    ("peer", "allowed"), [("10.0.0.1", True), ("10.0.0.1:5600", True), ("10.0.0.1:5601", False)]
)
def test_intent_naming_a_producer_is_held_against_the_peers_setting(peer: str, allowed: bool):
    intent = read_intent(CONSUME, Rules(True, True, Mode.PUSH, frozenset({peer})), NAME)

    assert isinstance(intent, Consume) is allowed


def test_intent_that_does_not_fit_the_role_is_refused():
    assert isinstance(read_intent(CONSUME, Rules(True, False, Mode.PUSH, None), NAME), Refuse)
    assert isinstance(
        read_intent({"do_remote_decode": True}, Rules(False, True, Mode.PUSH, None), NAME), Refuse
    )


def test_answer_is_what_a_consumer_reads():
    params = answer(HandoffKey(TransferId("t")), RequestId("r"), 12, ABOUT)

    assert read_intent(params, RULES, NAME) == Consume(
        HandoffKey(TransferId("t")), ABOUT.address, Mode.PULL, 1, 1
    )
    assert params["remote_block_ids"] == []
    assert params["remote_num_tokens"] == 12
