"""Bytes from strangers reach neither the engine nor its peers: they are refused, bounded in number and size, and in time."""

import random
import socket

import msgspec
import pytest

from kvbaton.runtime.guests import MAX_GUESTS
from kvbaton.runtime.links import MAX_STRANGERS
from kvbaton.testing.rig import MiniEngine, wait_until
from kvbaton.wire.frame import frame
from kvbaton.wire.messages import (
    Directory,
    Failed,
    Hello,
    Key,
    Ping,
    Pong,
    RankAddress,
    Refused,
    Register,
    Release,
    Welcome,
    encode,
)
from runtime.raw import Raw
from runtime.world import FAST, World

JUNK: dict[str, bytes] = {
    "random": random.Random(1).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "huge-length": b"KV\x01\x00\xff\xff\xff\xff" + b"x" * 4096,
    "other-version": b"KV\x63\x00\x00\x00\x00\x01x",
    "magic-then-junk": frame(random.Random(2).randbytes(512)),
    "deep": frame(b"\x91" * 60000),
    "wrong-message": frame(encode(Ping())),
    "hello-twice": frame(encode(Hello(b"n" * 32))) * 2,
    "hello-then-junk": frame(encode(Hello(b"n" * 32))) + b"\x00" * 64,
    "short-nonce": frame(b"\x92\xa5hello\xc4\x01n"),
}
PORTS = ["rank", "directory"]


def port_of(engine: MiniEngine, which: str) -> int:
    return engine.courier.address.port if which == "rank" else engine.directory.port


def hand_off(world: World, producer: MiniEngine, name: str = "later") -> None:
    """Prove that the engine still works."""
    consumer = world.engine(f"d-{name}")
    consumer.receive(name, name, producer.address, [3])
    producer.prefill(name, name, [4])

    assert consumer.wait_received(name) == {}
    assert consumer.block(0, 3) == producer.block(0, 4)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_hung_up_on_and_the_engine_goes_on(world: World, port: str, junk: str) -> None:
    producer = world.engine("p")
    producer.fill(1)
    with Raw(port_of(producer, port)) as raw:
        raw.sock.sendall(JUNK[junk])
        raw.read_until_closed()
    hand_off(world, producer)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    "start", [b"", b"K", b"KV\x01\x00\x00\x00\x10\x00half", frame(encode(Hello(b"n" * 32)))]
)
def test_stranger_who_never_finishes_the_greeting_is_shown_out(world: World, port: str, start: bytes) -> None:
    producer = world.engine("p", settings={"heartbeat": FAST}, guest_s=FAST.dial_s)
    producer.fill(1)
    with Raw(port_of(producer, port)) as raw:
        raw.sock.sendall(start)
        hand_off(world, producer)
        said = raw.read_until_closed()

    assert not any(isinstance(each, Ping) for each in said)
    producer.until(lambda courier: courier.links.num_strangers == 0)


def test_strangers_are_bounded_and_peers_still_get_in(world: World) -> None:
    producer = world.engine("p")
    producer.fill(1)
    crowd = [Raw(producer.courier.address.port) for _ in range(MAX_STRANGERS + 40)]
    try:
        producer.until(lambda courier: courier.links.num_strangers == MAX_STRANGERS)
        hand_off(world, producer)

        assert producer.ask(lambda courier: courier.links.num_strangers) <= MAX_STRANGERS
        assert crowd[0].read_until_closed() == []  # the oldest had to go
    finally:
        for raw in crowd:
            raw.sock.close()


def test_stranger_cannot_make_us_buffer_more_than_an_introduction(world: World) -> None:
    producer = world.engine("p")
    with Raw(producer.courier.address.port) as raw:
        raw.sock.sendall(frame(encode(Hello(b"n" * 32))) + b"KV\x01\x00\x00\x50\x00\x00")  # announces 5 MiB
        raw.read_until_closed()
    producer.until(lambda courier: courier.links.num_strangers == 0)


def test_introduction_with_unusable_metadata_is_refused_with_a_reason(world: World) -> None:
    producer, consumer = world.engine("p"), world.engine("d")
    identity = msgspec.structs.replace(consumer.courier.identity, agent_metadata=b"junk")
    with Raw(producer.courier.address.port) as raw:
        answer = raw.greet(identity)

    assert isinstance(answer, Refused)
    assert "metadata" in answer.detail


@pytest.mark.parametrize(
    "change",
    [
        {"groups": []},
        {"groups": [(0, b"\xff\xff\xff\x7f")]},
        {"groups": [(0, b"\x01\x00\x00\x00" * 2)]},
        {"mode": "teleport"},
    ],
)
def test_unacceptable_registration_is_answered_and_the_link_lives(
    world: World, change: dict[str, object]
) -> None:
    producer, consumer = world.engine("p"), world.engine("d")
    good: dict[str, object] = {
        "key": ("t", 0, 0), "mode": "push", "num_tokens": 16, "prompt_digest": b"", "groups": [(0, b"\x01\0\0\0")], "ttl_s": 5.0,
    }  # fmt: skip
    with Raw(producer.courier.address.port) as raw:
        assert isinstance(raw.greet(consumer.courier.identity), Welcome)
        raw.send(register({**good, **change}))
        answer = raw.read()
        assert isinstance(answer, Failed)
        assert answer.reason == "incompatible"
        raw.send(Ping(7))
        while isinstance(answer, (Failed, Ping)):
            answer = raw.read()
        assert answer == Pong(7)


def register(fields: dict[str, object]) -> Register:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(["register", *fields.values()]), type=Register)


def test_peer_speaking_for_a_handoff_of_another_link_is_refused_and_counted(world: World) -> None:
    producer, consumer = world.engine("p"), world.engine("d")
    stranger = world.engine("x")
    consumer.receive("r", "t", producer.address, [5])
    producer.until(lambda courier: courier.outbound.num_legs == 1)
    identity = stranger.courier.identity
    with Raw(producer.courier.address.port) as raw:
        assert isinstance(raw.greet(identity), Welcome)
        raw.send(
            register(
                {
                    "key": ("t", 0, 0),
                    "mode": "push",
                    "num": 16,
                    "digest": b"",
                    "groups": [(0, b"\2\0\0\0")],
                    "ttl": 5.0,
                }
            )
        )
        answer = raw.read()

    assert isinstance(answer, Failed)
    assert answer.reason == "already_claimed"
    assert producer.courier.take_statistics()["unexpected"] == {"registration refused: already_claimed": 1}
    producer.prefill("q", "t", [4])
    assert consumer.wait_received("r") == {}
    assert Key("t") == answer.key


def test_secret_on_one_side_only_or_a_wrong_one_fails_clearly(world: World) -> None:
    secrets = {"a": b"one", "b": b"two", "none": None}
    for theirs in secrets:
        for ours in secrets:
            if theirs == ours:
                continue
            producer = world.engine(f"p-{theirs}-{ours}", settings={"secret": secrets[theirs]})
            consumer = world.engine(f"d-{theirs}-{ours}", settings={"secret": secrets[ours]})
            consumer.receive("r", "t", producer.address, [5])

            assert "secret" in consumer.wait_received("r")["r"]


def test_equal_secrets_let_a_handoff_through(world: World) -> None:
    producer = world.engine("p", settings={"secret": b"one"})
    consumer = world.engine("d", settings={"secret": b"one"})
    consumer.receive("r", "t", producer.address, [5])
    producer.prefill("q", "t", [4])

    assert consumer.wait_received("r") == {}


def test_junk_on_an_established_link_ends_only_that_link(world: World) -> None:
    producer, consumer = world.engine("p"), world.engine("d")
    with Raw(producer.courier.address.port) as raw:
        assert isinstance(raw.greet(consumer.courier.identity), Welcome)
        raw.sock.sendall(b"\x00" * 100)
        raw.read_until_closed()
    wait_until(lambda: producer.ask(lambda courier: courier.links.known()) == [])
    hand_off(world, producer)


def test_release_through_the_directory_frees_the_prefill(world: World) -> None:
    producer = world.engine("p", settings={"secret": b"one"})
    producer.prefill("q", "t", [4])
    producer.until(lambda courier: courier.outbound.num_leases == 1)
    with Raw(producer.directory.port, b"one") as raw:
        raw.greet()
        assert isinstance(raw.read(), Directory)
        raw.send(Release(Key("t")))
        producer.wait_sent("q", timeout_s=5)

    wait_until(lambda: len(producer.directory.guests) == 0)


def test_release_for_a_rank_that_does_not_answer_is_given_up(world: World) -> None:
    producer = world.engine("p", guest_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        producer.directory.set_ranks([RankAddress(0, 0, "127.0.0.1", mute.getsockname()[1], 1)])
        with Raw(producer.directory.port) as raw:
            raw.greet()
            raw.read()
            for n in range(300):
                raw.send(Release(Key(f"t{n}")))
            wait_until(lambda: 1 < len(producer.directory.guests) <= MAX_GUESTS)
            wait_until(lambda: len(producer.directory.guests) <= 1)


def test_release_from_somebody_who_has_not_proved_the_secret_is_refused(world: World) -> None:
    producer = world.engine("p", settings={"secret": b"one"})
    producer.prefill("q", "t", [4])
    with Raw(producer.directory.port) as raw:
        raw.greet()
        raw.send(Release(Key("t")))
        said = raw.read_until_closed()

    assert isinstance(said[0], Refused)
    assert producer.collect().sent == set()
