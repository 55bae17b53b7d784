"""Frames: however the stream is cut up, the same payloads come out; what is not ours is refused from its first bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.wire.frame import HEADER_BYTES, MAX_FRAME_BYTES, WIRE_VERSION, Deframer, frame
from strategies import examples

payload_lists = st.lists(st.binary(max_size=60), max_size=6)


def feed_in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    deframer = Deframer()
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [payload for start, end in pairwise(edges) for payload in deframer.feed(stream[start:end])]


@given(payload_lists, st.lists(st.integers(0, 1000), max_size=10))
@examples(300)
def test_payloads_come_out_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    assert feed_in_pieces(b"".join(map(frame, payloads)), cuts) == payloads


@given(payload_lists)
@examples(50)
def test_payloads_come_out_byte_by_byte(payloads: list[bytes]) -> None:
    stream = b"".join(map(frame, payloads))
    deframer = Deframer()

    assert [payload for byte in stream for payload in deframer.feed(bytes([byte]))] == payloads


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
@examples(300)
def test_random_bytes_yield_payloads_or_a_refusal(junk: bytes, cuts: list[int]) -> None:
    try:
        payloads = feed_in_pieces(junk, cuts)
    except RemoteProtocolError:
        return

    assert sum(HEADER_BYTES + len(payload) for payload in payloads) <= len(junk)


@pytest.mark.parametrize(
    "stream", [b"GET / HT", b"\x16\x03\x01\x02\x00\x01\x00\x01", bytes(8), b"VK\x01\x00\x00\x00\x00\x00"]
)
def test_another_protocol_is_refused(stream: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not kvbaton"):
        Deframer().feed(stream)


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, 255])
def test_another_version_is_refused_and_both_are_named(version: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{version} received, {WIRE_VERSION} is spoken"):
        Deframer().feed(b"KV" + bytes([version, 0, 0, 0, 0, 0]))


def test_a_length_above_the_limit_is_refused_before_its_body_arrives() -> None:
    deframer = Deframer(max_bytes=10)

    assert deframer.feed(frame(bytes(10))) == [bytes(10)]
    with pytest.raises(RemoteProtocolError, match="11 bytes exceeds the limit of 10"):
        deframer.feed(frame(bytes(11))[:HEADER_BYTES])


def test_the_limit_can_be_raised_once_the_peer_is_known() -> None:
    deframer = Deframer(max_bytes=10)
    deframer.max_bytes = MAX_FRAME_BYTES

    assert deframer.feed(frame(bytes(100_000))) == [bytes(100_000)]


def test_the_largest_length_a_header_can_hold_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Deframer(MAX_FRAME_BYTES).feed(b"KV\x01\x00\xff\xff\xff\xff")


def test_a_stream_that_was_refused_stays_refused() -> None:
    deframer = Deframer()
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            deframer.feed(b"GET / HTTP/1.1")
