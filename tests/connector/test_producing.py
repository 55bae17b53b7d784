from types import SimpleNamespace

import pytest

from connector.stand_ins import ATTENTION, BLOCK_TOKENS, PRODUCE, ended, request, scheduler, step
from kvbaton.connector.groups import NO_BLOCK, CacheGroup
from kvbaton.kv.layout import GroupKind
from kvbaton.runtime.commands import PrefillAborted, PrefillFinished, PrefillPreempted, PrefillStarted

WINDOW = CacheGroup(1, GroupKind.ATTENTION, BLOCK_TOKENS, window_tokens=5)
STATE = CacheGroup(0, GroupKind.STATE, 1024)


class Pool:
    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=index, users=0) for index in range(64)]

    def touch(self, blocks) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, blocks) -> None:
        for block in blocks:
            block.users -= 1

    @property
    def used(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.users]


def run(half, entry, output):
    """One step, as vLLM does it: the counter moves after the connector was asked."""
    metadata = half.build(output)
    entry.num_computed_tokens += output.num_scheduled_tokens.get(entry.request_id, 0)
    return metadata


def blocks(progress):
    return [(group.first, group.ids.tolist()) for group in progress.groups]


def test_producer_reports_every_chunk_after_its_own_forward_and_each_block_once():
    half, entry = scheduler(), request(num_tokens=10, params=PRODUCE)
    half.on_new_request(entry)

    one = run(half, entry, step(new={"r": [[5]]}, tokens={"r": 4}))
    two = run(half, entry, step(cached={"r": [[6]]}, tokens={"r": 4}))
    three = run(half, entry, step(cached={"r": [[7]]}, tokens={"r": 2}))
    four = run(half, entry, step(cached={"r": None}, tokens={"r": 1}))

    assert isinstance(one.before[0], PrefillStarted)
    assert [m.after[0].final_tokens for m in (one, two, three)] == [4, 8, 10]
    assert [m.after[0].ended for m in (one, two, three)] == [False, False, True]
    assert [blocks(m.after[0]) for m in (one, two, three)] == [[(0, [5])], [(1, [6])], [(2, [7])]]
    assert four.after == ()


def facts(progresses):
    return [(each.final_tokens, each.ended, blocks(each)) for each in progresses]


def test_producer_with_a_cached_prefix_reports_it_before_the_first_step():
    half, entry = scheduler(), request(num_tokens=10, params=PRODUCE, num_computed_tokens=8)
    half.on_new_request(entry)

    told = run(half, entry, step(new={"r": [[5, 6, 7]]}, tokens={"r": 2}, computed={"r": 8}))

    assert facts(told.cached) == [(8, False, [(0, [5, 6])])]
    assert facts(told.after) == [(10, True, [(2, [7])])]


def test_producer_resumed_with_a_cached_prefix_reports_it_before_the_step():
    half, entry = scheduler(), request(num_tokens=10, params=PRODUCE, num_computed_tokens=4)
    half.on_new_request(entry)

    told = run(
        half, entry, step(cached={"r": [[5, 6, 7]]}, tokens={"r": 6}, resumed={"r"}, computed={"r": 4})
    )

    assert facts(told.cached) == [(4, False, [(0, [5])])]
    assert facts(told.after) == [(10, True, [(1, [6, 7])])]


@pytest.mark.parametrize(
    ("others", "final"),
    [
        # starts in this step and computes block 6, which became cached when it was scheduled
        ({"new": {"o": [[5, 6]]}, "computed": {"o": 4}}, 4),
        # goes on in this step, into a block that is new
        ({"cached": {"o": [[6]]}, "computed": {"o": 4}}, 4),
        # goes on in this step and fills up a block that it has had before: known by its place only
        ({"cached": {"o": None}, "computed": {"o": 6}}, 4),
        # the same, with no token that fills the block up: then it is in no cache
        ({"cached": {"o": None}, "computed": {"o": 5}}, 8),
        # with speculation a block may have been given out before any of its tokens is scheduled
        ({"cached": {"o": None}, "computed": {"o": 4}, "tokens": 4, "ahead": True}, 4),
        # resumes: its table is listed whole
        ({"cached": {"o": [[5, 6]]}, "resumed": {"o"}, "computed": {"o": 4}}, 4),
        # computes something else
        ({"new": {"o": [[8, 9]]}, "computed": {"o": 0}}, 8),
        ({"cached": {"o": None}, "computed": {"o": 30}}, 8),
    ],
)
def test_producer_does_not_send_cached_blocks_that_others_still_compute_in_this_step(others, final: int):
    half = scheduler(reserves_ahead=others.get("ahead", False))
    entry = request(num_tokens=10, params=PRODUCE, num_computed_tokens=8)
    half.on_new_request(entry)
    new = {**others.get("new", {}), "r": [[5, 6, 7]]}
    computed = {**others["computed"], "r": 8}

    told = run(
        half,
        entry,
        step(
            new,
            others.get("cached"),
            {"o": others.get("tokens", 2), "r": 2},
            others.get("resumed"),
            computed=computed,
        ),
    )

    assert facts(told.cached) == [(final, False, [(0, [5, 6][: final // BLOCK_TOKENS])])]
    assert facts(told.after) == [(10, True, [(final // BLOCK_TOKENS, [5, 6, 7][final // BLOCK_TOKENS :])])]


def test_producer_of_two_groups_reports_a_prefix_that_is_final_in_both():
    wide = CacheGroup(1, GroupKind.ATTENTION, 2 * BLOCK_TOKENS)
    half, entry = scheduler(ATTENTION, wide), request(num_tokens=20, params=PRODUCE, num_computed_tokens=16)
    half.on_new_request(entry)
    new = {"o": [[1, 2, 3, 4], [21, 22]], "r": [[1, 2, 3, 4, 5], [21, 22, 23]]}

    told = run(half, entry, step(new, tokens={"o": 4, "r": 4}, computed={"o": 12, "r": 16}))

    assert facts(told.cached) == [(8, False, [(0, [1, 2]), (0, [21])])]
    assert facts(told.after) == [(20, True, [(2, [3, 4, 5]), (1, [22, 23])])]


def test_producer_of_recurrent_state_sends_no_prefix_early():
    half, entry = (
        scheduler(STATE),
        request(num_tokens=3000, params=PRODUCE, num_computed_tokens=1024),
    )
    half.on_new_request(entry)

    assert run(half, entry, step(new={"r": [[5]]}, tokens={"r": 9}, computed={"r": 1024})).cached == ()


@pytest.mark.parametrize("how", ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"])
def test_producer_that_ended_well_keeps_its_blocks_and_answers(how: str):
    half, entry = scheduler(), request(params=PRODUCE)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1, 2, 3]]}, tokens={"r": 10}))

    kept, params = half.finished(ended(entry, how), [[1, 2, 3]])

    assert kept
    assert params is not None
    assert (params["transfer_id"], params["remote_host"], params["remote_port"]) == ("t-1", "10.0.0.9", 5601)
    assert half.build(step()).before == (PrefillFinished("r"),)


@pytest.mark.parametrize("computed", [4, 10])
def test_producer_aborted_while_running_keeps_its_blocks_but_answers_nothing(computed: int):
    half, entry = scheduler(), request(params=PRODUCE)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1, 2, 3]]}, tokens={"r": computed}))

    assert half.finished(ended(entry, "FINISHED_ABORTED"), [[1, 2, 3]]) == (True, None)
    (aborted,) = half.build(step()).before
    assert isinstance(aborted, PrefillAborted)
    assert aborted.held


def test_producer_aborted_in_the_queue_keeps_nothing():
    half, entry = scheduler(), request(params=PRODUCE)
    half.on_new_request(entry)

    assert half.finished(ended(entry, "FINISHED_ABORTED"), [[]]) == (False, None)
    started, aborted = half.build(step()).before
    assert isinstance(started, PrefillStarted)
    assert aborted == PrefillAborted("r", started.key, held=False)


def test_producer_preempted_in_its_last_chunk_starts_its_table_again():
    half, entry = scheduler(), request(num_tokens=10, params=PRODUCE)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1, 2, 3]]}, tokens={"r": 10}))
    entry.num_computed_tokens = 0

    lost = run(half, entry, step(preempted={"r"}))
    again = run(half, entry, step(new={"r": [[7, 8, 9]]}, tokens={"r": 10}))

    assert lost.preempted == ("r",)
    assert lost.before == (PrefillPreempted("r"),)
    assert (again.after[0].ended, blocks(again.after[0])) == (True, [(0, [7, 8, 9])])


def test_producer_preempted_and_resumed_as_a_cached_request_starts_its_table_again():
    half, entry = scheduler(), request(num_tokens=10, params=PRODUCE)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1]]}, tokens={"r": 4}))
    entry.num_computed_tokens = 0

    metadata = run(half, entry, step(cached={"r": [[7, 8]]}, tokens={"r": 8}, resumed={"r"}, preempted={"r"}))

    assert blocks(metadata.after[0]) == [(0, [7, 8])]


def test_producer_without_params_is_nobodys_business():
    half, entry = scheduler(), request()
    half.on_new_request(entry)

    metadata = run(half, entry, step(new={"r": [[1, 2, 3]]}, tokens={"r": 10}))

    assert (metadata.before, metadata.after) == ((), ())
    assert half.finished(ended(entry), [[1, 2, 3]]) == (False, None)
    assert half.take_stats().data["local"] == {"no_params": 1}


def test_producer_with_several_choices_hands_off_the_first_only():
    half = scheduler()
    half.on_new_request(request("0_x", params=PRODUCE))
    half.on_new_request(request("1_x", params=PRODUCE))

    assert [command.request_id for command in half.build(step()).before] == ["0_x"]


def test_producer_of_a_sliding_window_names_no_block_that_the_window_leaves():
    half, entry = scheduler(ATTENTION, WINDOW), request(num_tokens=12, params=PRODUCE)
    half.on_new_request(entry)

    (progress,) = run(half, entry, step(new={"r": [[1, 2, 3], [4, 5, 6]]}, tokens={"r": 12})).after

    assert blocks(progress) == [(0, [1, 2, 3]), (0, [NO_BLOCK, 5, 6])]


@pytest.mark.parametrize("end", ["sent", "preempted", "aborted_early"])
def test_producer_of_a_sliding_window_holds_its_last_blocks_until_they_are_sent(end: str):
    half, entry, pool = scheduler(ATTENTION, WINDOW), request(num_tokens=12, params=PRODUCE), Pool()
    half.producing.holder.bind(pool)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1, 2, 3], [4, 5, 6]]}, tokens={"r": 12}))

    assert pool.used == [5, 6]
    if end == "preempted":
        half.build(step(preempted={"r"}))
    elif end == "aborted_early":
        half.finished(ended(entry, "FINISHED_ABORTED"), [[], []])
    else:
        half.finished(ended(entry), [[1, 2, 3], [0, 0, 6]])
        assert pool.used == [5, 6]
        half.reported({"r"}, ())
    assert pool.used == []


def test_producer_of_recurrent_state_leaves_the_last_token_to_the_consumer():
    half, entry = scheduler(STATE), request(num_tokens=10, params=PRODUCE)
    half.on_new_request(entry)

    metadata = run(half, entry, step(new={"r": [[1]]}, tokens={"r": 9}))

    assert metadata.before[0].num_tokens == 10
    assert metadata.after[0].ended
    assert (entry.num_prompt_tokens, len(entry.prompt_token_ids), entry.max_tokens) == (9, 9, 1)


def test_producer_gauge_counts_what_waits_to_be_sent():
    half, entry = scheduler(), request(params=PRODUCE)
    half.on_new_request(entry)
    run(half, entry, step(new={"r": [[1, 2, 3]]}, tokens={"r": 10}))
    half.finished(ended(entry), [[1, 2, 3]])

    assert half.take_stats().data["gauges"]["scheduler"]["held_prefills"] == 1
    half.reported({"r"}, ())
    assert half.take_stats().data["gauges"]["scheduler"]["held_prefills"] == 0
    assert half.take_stats() is None
