"""When sending layer by layer pays, from what was measured."""

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


@pytest.mark.parametrize("ended", [False, True])
def test_layers_are_taken_to_pay_until_something_was_measured(ended):
    assert LinkSpeed().tail_pays(STEP_BYTES, NUM_REGIONS, ended=ended)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(("post_s", "pays"), [(0.0001, True), (0.1, False)])
def test_layers_pay_where_they_hide_more_than_their_posts_cost(post_s, pays, ended):
    assert speed(post_s=post_s, link=50e6).tail_pays(STEP_BYTES, NUM_REGIONS, ended=ended) is pays


@pytest.mark.parametrize(("link", "pays"), [(25e6, True), (55e6, True), (70e6, False), (25e9, False)])
def test_layers_amid_a_prompt_pay_only_where_the_link_is_slower_than_twice_what_is_made(link, pays):
    known = speed(post_s=1e-6, link=link, made=30e6)

    assert known.tail_pays(STEP_BYTES, NUM_REGIONS, ended=False) is pays
    assert known.tail_pays(STEP_BYTES, NUM_REGIONS, ended=True)


def test_a_step_that_made_nothing_or_took_no_time_is_not_counted():
    known = speed(post_s=1e-6, link=25e9)
    known.computed(0, 1.0)
    known.computed(STEP_BYTES, 0.0)

    assert known.made_bytes_per_s is None
