"""Messages: what goes in comes out, and foreign bytes yield RemoteProtocolError and nothing else."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.wire import messages as m
from strategies import examples, transfer_ids
from wire.messages_strategies import messages, written
from wire.samples import SAMPLES

ENCODED = [m.encode(sample) for sample in SAMPLES.values()]


def read_or_refuse(payload: bytes) -> None:
    for decode in (m.decode, m.decode_written):
        with contextlib.suppress(RemoteProtocolError):
            decode(payload)


@given(messages)
@examples(150)
def test_every_message_survives_the_wire(message: m.AnyMessage) -> None:
    assert m.decode(m.encode(message)) == message


@given(written)
@examples(100)
def test_a_transfer_notification_survives_the_wire(message: m.Written) -> None:
    assert m.decode_written(m.encode(message)) == message


@given(st.binary(max_size=200))
@examples(200)
def test_random_bytes_are_read_or_refused(payload: bytes) -> None:
    read_or_refuse(payload)


@given(
    st.sampled_from(ENCODED),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
    st.integers(0, 600),
    st.binary(max_size=12),
)
@examples(400)
def test_mutated_messages_are_read_or_refused(
    valid: bytes, flips: list[tuple[int, int]], cut: int, inserted: bytes
) -> None:
    damaged = bytearray(valid)
    for position, value in flips:
        damaged[position % len(damaged)] = value
    cut %= len(damaged)
    read_or_refuse(bytes(damaged))
    read_or_refuse(bytes(damaged[:cut]))
    read_or_refuse(bytes(damaged[:cut] + inserted + damaged[cut:]))


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from([*SAMPLES]), st.lists(JUNK, max_size=9))
@examples(120)
def test_a_known_tag_with_fields_of_any_type_is_read_or_refused(tag: str, fields: list[object]) -> None:
    read_or_refuse(msgspec.msgpack.encode([tag, *fields]))
    read_or_refuse(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 60_000,
        b"\x93\xa4ping\x01" + b"\x91" * 60_000,
        b"\x93\xa4ping\x01" + b"\x81\x01" * 60_000,
        b"\x95\xa1x" + b"\x91" * 60_000,
        b"\x95\x93\xa1a\x00\x00\x01\xc0" + b"\x91" * 60_000,
    ],
    ids=["array", "in a skipped field", "maps in a skipped field", "in a key", "in a notification"],
)
def test_deep_nesting_is_refused_and_not_a_recursion_error(payload: bytes) -> None:
    for decode in (m.decode, m.decode_written):
        with pytest.raises(RemoteProtocolError):
            decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x95\xa9directory\xa1e\x01\x01\xdd\xff\xff\xff\xff",
        b"\x95\xa5offer\x93\xa1a\x00\x00\x00\xdd\xff\xff\xff\xff",
        b"\x93\xa6sealed\x93\xa1a\x00\x00\xc6\xff\xff\xff\xff",
        b"\x92\xa5hello\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x93\xa4ping\x01\xdd\xff\xff\xff\xff",
        b"\x92\xa9introduce\x9a\xa1e\x00\x00\x01\x01\x01\xa1a\xc4\x00\x94\xa4DRAM\x90\x90\x00\xdf\xff\xff\xff\xff",
    ],
)
def test_a_length_that_is_not_there_is_refused_without_allocating_it(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(payload)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 86401.0, True, None, "1"])
def test_a_time_to_live_that_is_no_duration_is_refused(ttl_s: object) -> None:
    payload = msgspec.msgpack.encode(["register", ["a", 0, 0], "push", 3, b"", [], ttl_s])

    with pytest.raises(RemoteProtocolError):
        m.decode(payload)


@pytest.mark.parametrize("number", [-1, 1 << 62, (1 << 64) - 1, 1.0, True, None])
def test_a_number_outside_its_range_is_refused(number: object) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(msgspec.msgpack.encode(["progress", ["a", 0, 0], number]))


@given(transfer_ids.map(lambda text: text * 200).filter(lambda text: len(text) > 128))
@examples(20)
def test_an_endless_transfer_id_is_refused(transfer_id: str) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(msgspec.msgpack.encode(["received", [transfer_id, 0, 0]]))


def test_an_empty_transfer_id_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(msgspec.msgpack.encode(["received", ["", 0, 0]]))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc0", b"\x90", b"\x91\x05", b"\x91\xa7unknown", b"\x92\xa4ping\x01\x01"]
)
def test_what_is_not_exactly_one_message_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        m.decode(payload)


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert m.decode(msgspec.msgpack.encode(["ping", 3, "new", {"field": [1]}])) == m.Ping(3)


def test_fields_that_an_older_version_lacks_take_their_defaults() -> None:
    assert m.decode(msgspec.msgpack.encode(["challenge", bytes(16)])) == m.Challenge(bytes(16), b"")
