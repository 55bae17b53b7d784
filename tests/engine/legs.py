"""Legs: one engine asked directly, as a router asks it, with parameters it can act upon."""

import socket

from engine.deployment import HOST, Actor, Deployment
from kvbaton.wire.frame import Deframer, frame
from kvbaton.wire.messages import AnyMessage, Directory, Hello, Lookup, decode, encode


def side_channel(engine: Actor) -> int:
    return int(engine.spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])


def good_params(pair: Deployment, transfer_id: str) -> dict[str, object]:
    """Return parameters by which a decode engine finds the prefill engine."""
    port = side_channel(pair.prefill[0])
    return {
        "do_remote_prefill": True,
        "remote_engine_id": directory_of(HOST, port).engine_id,
        "remote_host": HOST,
        "remote_port": port,
        "transfer_id": transfer_id,
        "tp_size": 1,
        "pp_size": 1,
    }


def directory_of(host: str, port: int) -> Directory:
    """Ask an engine's side channel where its ranks listen, as a peer does."""
    with socket.create_connection((host, port), timeout=5) as connection:
        deframer = Deframer()
        connection.sendall(frame(encode(Hello(nonce=b"n" * 16))))
        receive(connection, deframer)
        connection.sendall(frame(encode(Lookup())))
        found = receive(connection, deframer)
    assert isinstance(found, Directory)
    return found


def receive(connection: socket.socket, deframer: Deframer) -> AnyMessage:
    while True:
        data = connection.recv(1 << 16)
        assert data, "the connection was closed"
        for payload in deframer.feed(data):
            return decode(payload)
