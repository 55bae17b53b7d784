"""The scheduler half behind vLLM's own scheduler, which asserts what a connector must never do; only the workers are pretended."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from connector.stand_ins import CONSUME
from connector.vllm_engine import Engine, Wanted, make_scheduler
from kvbaton.runtime.commands import (
    CancelReceive,
    DeclineTransfer,
    PrefillAborted,
    PrefillFinished,
    PrefillPreempted,
    PrefillStarted,
    StartReceive,
)

PRODUCE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
def make_engine(model: str) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(
        role: str = "kv_producer",
        policy: str = "fail",
        window: bool = False,
        num_blocks: int = 100,
        **arguments: Any,
    ) -> Engine:
        wanted = Wanted(model, role, policy, window, num_blocks, arguments=arguments)
        engines.append(Engine(make_scheduler(wanted)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.shutdown()


def test_prefill_in_chunks_reports_each_block_once_and_answers(make_engine):
    engine = make_engine()
    name = engine.add(150, PRODUCE)
    outputs = [output for _ in range(3) for output in engine.step()]

    assert [p.final_tokens for p in engine.frontiers] == [64, 128, 150]
    assert [p.ended for p in engine.frontiers] == [False, False, True]
    assert [p.tokens_left for p in engine.frontiers] == [86, 22, 0]
    firsts = [(p.groups[0].first, p.groups[0].ids.size) for p in engine.frontiers]
    assert firsts == [(0, 2), (2, 2), (4, 1)]
    assert outputs[-1].kv_transfer_params["remote_num_tokens"] == 150
    assert [c.request_id for c in engine.commands(PrefillStarted)] == [name]


def test_finished_prefill_keeps_its_blocks_and_the_engine_stepping_until_sent(make_engine):
    engine = make_engine()
    free = engine.num_free
    name = engine.add(100, PRODUCE)
    engine.step()
    engine.step()
    held = engine.num_free

    assert engine.scheduler.has_requests()
    engine.step()
    assert [c.request_id for c in engine.commands(PrefillFinished)] == [name]
    assert held == free - 4
    engine.step(sent=(name,))
    assert engine.num_free == free
    assert not engine.scheduler.has_requests()


def test_cached_prefix_is_reported_before_the_step_that_computes_the_rest(make_engine):
    engine = make_engine()
    first = engine.add(100, PRODUCE)
    for _ in range(3):
        engine.step()
    engine.step(sent=(first,))
    engine.steps.clear()
    engine.add(100, PRODUCE)
    engine.step()

    (prefix,) = engine.steps[0].cached
    (rest,) = engine.frontiers
    assert (prefix.final_tokens, prefix.ended) == (96, False)
    assert (prefix.groups[0].first, prefix.groups[0].ids.size) == (0, 3)
    assert (rest.final_tokens, rest.ended) == (100, True)
    assert (rest.groups[0].first, rest.groups[0].ids.size) == (3, 1)


def test_prefix_that_another_request_computes_in_the_same_step_is_not_reported_early(make_engine):
    engine = make_engine()
    engine.add(40, PRODUCE)
    engine.add(40, {**PRODUCE, "transfer_id": "other"})
    engine.step()

    # what this test is about: vLLM takes blocks for cached that nobody has computed yet
    first, second = engine.frontiers
    assert second.groups[0].ids.tolist()[0] == first.groups[0].ids.tolist()[0]
    assert engine.steps[0].cached == ()


def test_prefill_aborted_between_chunks_is_held_until_the_workers_let_go(make_engine):
    engine = make_engine()
    free = engine.num_free
    name = engine.add(300, PRODUCE)
    engine.step()
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    assert engine.num_free < free
    engine.step()
    assert [c.held for c in engine.commands(PrefillAborted)] == [True]
    engine.step(sent=(name,))
    assert engine.num_free == free
    assert not engine.scheduler.has_requests()


def test_prefill_aborted_in_the_queue_is_told_and_forgotten(make_engine):
    engine = make_engine()
    name = engine.add(300, PRODUCE)
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    assert engine.scheduler.has_requests()
    engine.step()
    assert [c.held for c in engine.commands(PrefillAborted)] == [False]
    assert not engine.scheduler.has_requests()


def test_prefill_preempted_for_want_of_blocks_is_reported_again_from_the_start(make_engine):
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    first = engine.add(120, max_tokens=120)
    second = engine.add(120, PRODUCE, first=2, max_tokens=40)
    for _ in range(150):
        engine.step()
        if engine.commands(PrefillPreempted):
            break

    assert [c.request_id for c in engine.commands(PrefillPreempted)] == [second]
    engine.steps.clear()
    engine.scheduler.finish_requests(first, RequestStatus.FINISHED_ABORTED)
    for _ in range(6):
        engine.step()
    own = [p for p in engine.frontiers if p.request_id == second]
    assert own[0].groups[0].first == 0
    assert own[-1].ended


def test_consumer_waits_receives_and_runs(make_engine):
    engine = make_engine("kv_consumer")
    free = engine.num_free
    name = engine.add(100, CONSUME)
    engine.step()
    (start,) = engine.commands(StartReceive)

    assert isinstance(start, StartReceive)
    assert (start.groups[0].first, start.groups[0].ids.size, start.num_tokens) == (0, 4, 100)
    assert engine.step() == []
    engine.step(received=(name,))
    (output,) = engine.step()
    assert output.new_token_ids == [7]
    assert engine.num_free == free
    assert len(engine.commands(StartReceive)) == 1


def test_consumer_with_a_cached_prefix_asks_only_for_the_rest(make_engine):
    engine = make_engine("kv_consumer")
    first = engine.add(70)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    engine.add(100, CONSUME)
    engine.step()

    (start,) = engine.commands(StartReceive)
    assert first
    assert (start.groups[0].first, start.groups[0].ids.size) == (2, 2)


def test_consumer_whose_receive_failed_ends_with_an_error(make_engine):
    engine = make_engine("kv_consumer", "fail")
    free = engine.num_free
    name = engine.add(100, CONSUME)
    engine.step()
    (output,) = engine.step(failed=(name,))

    assert str(output.finish_reason) == "error"
    assert engine.num_free == free
    engine.step()
    assert not engine.scheduler.has_requests()


def test_consumer_whose_receive_failed_computes_its_prompt_where_the_policy_says_so(make_engine):
    engine = make_engine("kv_consumer", "recompute")
    name = engine.add(100, CONSUME)
    engine.step()
    engine.step(failed=(name,))
    outputs = [output for _ in range(3) for output in engine.step()]

    assert outputs[-1].new_token_ids == [7]
    assert len(engine.commands(StartReceive)) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 100])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_request_with_nonsense_fails_alone(make_engine, num_tokens: int, role: str):
    engine = make_engine(role)
    free = engine.num_free
    name = engine.add(num_tokens, CONSUME | {"remote_port": "telnet"})
    engine.step()
    (refused,) = engine.steps[-1].refused

    assert refused.request_id == name
    (output,) = engine.step(failed=(name,))
    assert str(output.finish_reason) == "error"
    assert engine.num_free == free


def test_consumer_aborted_while_waiting_frees_when_nothing_can_write_any_more(make_engine):
    engine = make_engine("kv_consumer")
    free = engine.num_free
    name = engine.add(100, CONSUME)
    engine.step()
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    engine.step()

    assert engine.commands(CancelReceive) == [CancelReceive(name)]
    assert engine.num_free < free
    engine.step(failed=(name,))
    assert engine.num_free == free
    assert not engine.scheduler.has_requests()


def test_consumer_with_all_but_its_last_block_cached_still_asks_for_that_one(make_engine):
    engine = make_engine("kv_consumer")
    engine.add(128)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    engine.add(128, CONSUME)
    engine.step()

    (start,) = engine.commands(StartReceive)
    assert (start.groups[0].first, start.groups[0].ids.size) == (3, 1)


def test_consumer_with_prompt_logprobs_computes_here_and_releases_the_prefill(make_engine):
    engine = make_engine("kv_consumer")
    engine.add(60, CONSUME, prompt_logprobs=1)
    engine.step()

    assert engine.commands(StartReceive) == []
    assert len(engine.commands(DeclineTransfer)) == 1


@pytest.mark.parametrize("num_tokens", [96, 97, 100, 127, 128, 129, 160])
def test_sliding_window_blocks_asked_for_are_blocks_offered(make_engine, num_tokens: int):
    producer, consumer = make_engine(window=True), make_engine("kv_consumer", window=True)
    free = producer.num_free
    name = producer.add(num_tokens, PRODUCE)
    for _ in range(4):
        producer.step()
    consumer.add(num_tokens, CONSUME)
    consumer.step()
    (start,) = consumer.commands(StartReceive)

    offered = [p.groups[1] for p in producer.frontiers]
    by_index = {group.first + i: int(block) for group in offered for i, block in enumerate(group.ids)}
    wanted = range(start.groups[1].first, start.groups[1].end)
    assert 0 < len(wanted) <= 3
    assert all(by_index[index] > 0 for index in wanted)
    pool = producer.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[by_index[index]].ref_cnt > 0 for index in wanted)
    producer.step(sent=(name,))
    assert producer.num_free == free
