import numpy as np
import pytest

from connector.stand_ins import ATTENTION, BLOCK_TOKENS, CONSUME, Sampling, ended, request, scheduler, step
from kvbaton.connector.consuming import missing_blocks
from kvbaton.connector.groups import CacheGroup
from kvbaton.kv.layout import GroupKind
from kvbaton.runtime.commands import CancelReceive, DeclineTransfer, StartReceive

WINDOW = CacheGroup(1, GroupKind.ATTENTION, BLOCK_TOKENS, window_tokens=8)
STATE = CacheGroup(0, GroupKind.STATE, 1024, num_scratch_blocks=2)


def test_consumer_waits_for_all_but_the_last_token():
    half, entry = scheduler(), request(num_tokens=10, params=CONSUME)
    half.on_new_request(entry)

    assert half.num_loadable(entry, 0) == (9, True)
    assert half.num_loadable(entry, 0) == (9, True)


def test_consumer_registers_only_what_is_missing():
    half, entry = scheduler(), request(num_tokens=10, params=CONSUME)
    half.on_new_request(entry)
    half.allocated(entry, [[7, 8, 9]], half.num_loadable(entry, 4)[0])

    (start,) = half.build(step()).before

    assert isinstance(start, StartReceive)
    assert (start.num_tokens, start.key.transfer_id, start.address.host) == (10, "t-1", "10.0.0.1")
    assert start.groups[0].first == 1
    assert start.groups[0].ids.tolist() == [8, 9]


def test_consumer_registers_once_though_asked_twice_and_preempted():
    half, entry = scheduler(), request(params=CONSUME)
    half.on_new_request(entry)
    half.allocated(entry, [[1, 2, 3]], 9)
    half.build(step())
    half.allocated(entry, [[1, 2, 3]], 0)
    half.reported((), {"r"})

    assert half.num_loadable(entry, 0) == (0, False)
    half.allocated(entry, [[1, 2, 3]], 0)
    assert half.build(step(preempted={"r"})).before == ()


@pytest.mark.parametrize("computed", [9, 8])
def test_consumer_that_misses_few_tokens_computes_them_and_declines_once(computed: int):
    half, entry = scheduler(threshold_tokens=2), request(num_tokens=10, params=CONSUME)
    half.on_new_request(entry)

    assert half.num_loadable(entry, computed) == (0, False)
    half.allocated(entry, [[1, 2, 3]], 0)
    half.allocated(entry, [[1, 2, 3]], 0)
    (decline,) = half.build(step()).before
    assert isinstance(decline, DeclineTransfer)
    assert decline.key.transfer_id == "t-1"


@pytest.mark.parametrize("why", ["sampling", "skip"])
def test_consumer_that_needs_prompt_logprobs_computes_here_and_declines(why: str):
    entry = request(params=CONSUME)
    entry.skip_reading_prefix_cache = why == "skip"
    if why == "sampling":
        entry.sampling_params = Sampling(prompt_logprobs=1)
    half = scheduler()
    half.on_new_request(entry)

    assert half.num_loadable(entry, 0) == (0, False)
    half.allocated(entry, [[1, 2, 3]], 0)
    assert isinstance(half.build(step()).before[0], DeclineTransfer)
    assert half.take_stats().data["local"] == {"prompt_logprobs": 1}


def test_consumer_with_several_choices_receives_the_first_and_keeps_the_handoff():
    half = scheduler()
    first, second = request("0_cmpl-x", params=CONSUME), request("1_cmpl-x", params=CONSUME)
    half.on_new_request(first)
    half.on_new_request(second)
    half.allocated(second, [[4, 5, 6]], half.num_loadable(second, 0)[0])
    half.allocated(first, [[1, 2, 3]], half.num_loadable(first, 0)[0])

    before = half.build(step()).before

    assert [type(command) for command in before] == [StartReceive]
    assert before[0].request_id == "0_cmpl-x"


def test_consumer_with_nonsense_fails_through_the_workers():
    half, entry = scheduler(), request(num_tokens=1, params=CONSUME | {"remote_port": "x"})
    half.on_new_request(entry)
    half.allocated(entry, [[1]], half.num_loadable(entry, 0)[0])

    metadata = half.build(step())

    assert metadata.before == ()
    assert metadata.refused[0].request_id == "r"
    assert "remote_port" in metadata.refused[0].reason


def test_consumer_refused_under_the_recompute_policy_computes_here_afterwards():
    half, entry = scheduler(), request(params={"do_remote_prefill": True})
    half.on_new_request(entry)
    half.allocated(entry, [[1, 2, 3]], half.num_loadable(entry, 0)[0])
    half.build(step())
    half.reported((), {"r"})

    assert half.num_loadable(entry, 0) == (0, False)


def test_consumer_aborted_in_the_queue_lets_the_producer_free():
    half, entry = scheduler(), request(params=CONSUME)
    half.on_new_request(entry)

    assert half.finished(ended(entry, "FINISHED_ABORTED"), [[]]) == (False, None)
    assert half.has_news
    assert isinstance(half.build(step()).before[0], DeclineTransfer)
    assert not half.has_news


def test_consumer_aborted_while_waiting_cancels():
    half, entry = scheduler(), request(params=CONSUME)
    half.on_new_request(entry)
    half.allocated(entry, [[1, 2, 3]], 9)
    half.build(step())

    half.finished(ended(entry, "FINISHED_ABORTED"), [[1, 2, 3]])

    assert half.build(step()).before == (CancelReceive("r"),)


def test_consumer_that_finished_normally_says_nothing():
    half, entry = scheduler(), request(params=CONSUME)
    half.on_new_request(entry)
    half.allocated(entry, [[1, 2, 3]], 9)
    half.build(step())
    half.reported((), {"r"})

    assert half.finished(ended(entry), [[1, 2, 3]]) == (False, None)
    assert half.build(step()).before == ()


def test_both_sides_of_one_prompt_have_one_digest():
    consumer, producer = scheduler(), scheduler()
    one = request("a", params=CONSUME)
    consumer.on_new_request(one)
    consumer.allocated(one, [[1, 2, 3]], 9)
    producer.on_new_request(request("b", params={"do_remote_decode": True}))
    other = request("c", num_tokens=10, params={"do_remote_decode": True}, cache_salt="salt")
    producer.on_new_request(other)

    started = producer.build(step()).before

    assert consumer.build(step()).before[0].digest == started[0].digest
    assert started[0].digest != started[1].digest


@pytest.mark.parametrize(
    ("table", "num_local", "num_loaded", "first", "ids"),
    [
        ([1, 2, 3, 4], 0, 9, 0, [1, 2, 3]),
        ([1, 2, 3, 4], 4, 8, 1, [2]),
        ([1, 2], 8, 8, 2, []),
        ([0, 0, 5, 6], 0, 16, 2, [5, 6]),
    ],
)
def test_missing_blocks_are_those_between_local_and_loaded(table, num_local, num_loaded, first, ids):
    blocks = missing_blocks(ATTENTION, table, num_local, num_loaded)

    assert blocks.first == first
    np.testing.assert_array_equal(blocks.ids, ids)


@pytest.mark.parametrize(
    ("table", "first", "ids"), [([9, 10, 11], 0, [9]), ([9], 0, [9]), ([0, 8, 10, 11], 1, [8])]
)
def test_missing_blocks_of_recurrent_state_are_the_running_state(table, first, ids):
    blocks = missing_blocks(STATE, table, 0, 99)

    assert (blocks.first, blocks.ids.tolist()) == (first, ids)
