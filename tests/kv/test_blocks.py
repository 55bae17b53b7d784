"""Block lists: ids survive encoding, foreign bytes are refused, and finality is never claimed too early."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.kv.blocks import (
    MAX_BLOCKS_PER_GROUP,
    GroupBlocks,
    decode_ids,
    encode_ids,
    group_blocks,
    num_final_blocks,
)
from kvbaton.kv.layout import Group, GroupKind
from strategies import examples

ids = st.lists(st.integers(0, (1 << 31) - 1), max_size=40)


@given(st.integers(0, 1 << 40), ids)
@examples(80)
def test_ids_survive_encoding(first: int, listed: list[int]) -> None:
    read = decode_ids(first, encode_ids(group_blocks(first, listed)))

    assert read.first == first
    assert read.ids.dtype == np.int64
    assert read.ids.tolist() == listed
    assert read.end == first + len(listed)


def test_ids_are_little_endian_and_four_bytes_each() -> None:
    assert encode_ids(group_blocks(0, [1, 256])).hex() == "0100000000010000"


@given(st.integers(-5, 5), st.binary(max_size=64))
@examples(80)
def test_random_bytes_are_read_as_usable_ids_or_refused(first: int, data: bytes) -> None:
    try:
        read = decode_ids(first, data)
    except RemoteProtocolError:
        return

    assert len(data) % 4 == 0
    assert first >= 0
    assert all(0 <= each < 1 << 31 for each in read.ids.tolist())


@pytest.mark.parametrize(
    ("first", "data"),
    [
        (0, b"\x00"),
        (0, bytes(7)),
        (-1, bytes(4)),
        (0, b"\xff\xff\xff\xff"),
        (0, bytes(4 * (MAX_BLOCKS_PER_GROUP + 1))),
    ],
    ids=["one byte", "odd", "negative first", "negative id", "too many"],
)
def test_a_bad_list_is_refused(first: int, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_ids(first, data)


@given(st.integers(0, 20), ids, st.integers(-3, 70), st.integers(-3, 70))
@examples(120)
def test_between_returns_exactly_what_is_listed(first: int, listed: list[int], start: int, end: int) -> None:
    blocks = group_blocks(first, listed)
    if not first <= start <= end <= blocks.end:
        with pytest.raises(RemoteProtocolError):
            blocks.between(start, end)
        return

    expected = [listed[index - first] for index in range(start, end)]
    assert blocks.between(start, end).tolist() == expected


def test_an_empty_list_ends_where_it_starts() -> None:
    assert GroupBlocks(7, np.empty(0, np.int64)).end == 7
    assert group_blocks(7, []).between(7, 7).size == 0


@given(st.integers(1, 128), st.integers(0, 2000))
@examples(80)
def test_an_attention_block_is_final_when_its_last_token_is(block_tokens: int, final_tokens: int) -> None:
    count = num_final_blocks(Group(GroupKind.ATTENTION, block_tokens), final_tokens, ended=False)

    assert count is not None
    assert count * block_tokens <= final_tokens < (count + 1) * block_tokens


@given(st.integers(1, 128), st.integers(0, 2000))
@examples(50)
def test_a_state_block_is_not_final_before_the_end(block_tokens: int, final_tokens: int) -> None:
    assert num_final_blocks(Group(GroupKind.STATE, block_tokens), final_tokens, ended=False) == 0


@pytest.mark.parametrize("kind", GroupKind)
def test_every_block_is_final_at_the_end(kind: GroupKind) -> None:
    assert num_final_blocks(Group(kind, 16), 17, ended=True) is None
