"""In how many parts a step is sent, from what was measured."""

import pytest

from kvbaton.runtime.link_speed import LinkSpeed

NUM_REGIONS = 8
STEP_BYTES = 8 << 20


def speed(*, post_s: float, link: float, made: float | None = None) -> LinkSpeed:
    """Rates in bytes per second."""
    known = LinkSpeed()
    known.posted(post_s)
    known.landed(STEP_BYTES, STEP_BYTES / link)
    if made is not None:
        known.computed(STEP_BYTES, STEP_BYTES / made)
    return known


@pytest.mark.parametrize("left_bytes", [0, STEP_BYTES])
def test_every_layer_leaves_alone_until_something_was_measured(left_bytes):
    assert LinkSpeed().tail_parts(STEP_BYTES, left_bytes, NUM_REGIONS) == NUM_REGIONS


@pytest.mark.parametrize(("num_bytes", "parts"), [(0, 1), (100_000, 1), (200_000, 3)])
def test_first_parts_are_large_enough_to_be_measured(num_bytes, parts):
    known = LinkSpeed()
    assert known.tail_parts(num_bytes, 0, NUM_REGIONS) == parts
    known.posted(0.0001)
    known.landed(num_bytes // parts, 0.01)
    assert (known.bytes_per_s is None) == (num_bytes == 0)


def test_nothing_leaves_in_parts_while_consumers_pull():
    known = speed(post_s=1e-9, link=50e6)
    known.is_pushed = False

    assert known.tail_parts(STEP_BYTES, 0, NUM_REGIONS) == 1


@pytest.mark.parametrize(("post_s", "parts"), [(1e-9, 8), (0.0002, 8), (0.001, 4), (0.003, 2), (0.1, 1)])
def test_fewer_parts_the_dearer_a_post(post_s, parts):
    """The step's KV takes 168 ms."""
    assert speed(post_s=post_s, link=50e6).tail_parts(STEP_BYTES, 0, NUM_REGIONS) == parts


@pytest.mark.parametrize(("link", "parts"), [(12e6, 5), (25e6, 4), (35e6, 1), (25e9, 1)])
def test_amid_a_prompt_half_as_many_and_only_where_the_link_is_slower_than_the_engine(link, parts):
    known = speed(post_s=0.0005, link=link, made=30e6)

    assert known.tail_parts(STEP_BYTES, 100 * STEP_BYTES, NUM_REGIONS) == parts


@pytest.mark.parametrize(("left", "parts"), [(1.0, 1), (0.5, 2), (0.25, 4), (0.001, 8)])
def test_a_step_before_a_short_last_one_leaves_in_so_many_parts_that_the_last_is_hidden(left, parts):
    """The step's KV takes 168 ms, and as long to make: whole, it would leave behind what the last step is shorter by."""
    known = speed(post_s=0.0002, link=50.1e6, made=50e6)

    assert known.tail_parts(STEP_BYTES, left * STEP_BYTES, NUM_REGIONS) == parts


def test_a_step_that_made_nothing_or_took_no_time_is_not_counted():
    known = speed(post_s=1e-6, link=25e9)
    known.computed(0, 1.0)
    known.computed(16 << 10, 0.001)
    known.computed(STEP_BYTES, 0.0)

    assert known.made_bytes_per_s is None


@pytest.mark.parametrize(("before", "after"), [(5e9, 50e6), (50e6, 5e9)])
def test_a_link_that_changes_is_known_again_after_a_few_transfers(before, after):
    known = speed(post_s=0.0005, link=before)
    for _ in range(8):
        known.landed(STEP_BYTES, STEP_BYTES / after)

    assert known.bytes_per_s == pytest.approx(after, rel=0.5)


def test_a_link_that_has_become_slow_is_known_at_once():
    known = speed(post_s=0.0005, link=5e9)
    known.landed(STEP_BYTES, STEP_BYTES / 50e6)

    assert known.bytes_per_s == pytest.approx(50e6, rel=1)


def test_a_transfer_is_expected_to_take_what_its_like_took():
    known = LinkSpeed()

    assert known.expected_s(STEP_BYTES) == 0
    known.landed(STEP_BYTES, 0.2)
    assert known.expected_s(STEP_BYTES // 2) == pytest.approx(0.1)
