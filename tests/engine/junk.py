"""Junk: what nobody in their right mind sends, for requests and for sockets."""

import random
import socket
import struct

LONG = "x" * 5000
FAR_AWAY = "192.0.2.1"  # TEST-NET-1: packets to it go nowhere


def bad_params(good: dict[str, object]) -> dict[str, object]:
    """Return `kv_transfer_params` by what is wrong with them, each a change of good ones for a decode engine."""

    def without(name: str) -> dict[str, object]:
        return {key: value for key, value in good.items() if key != name}

    cases: dict[str, object] = {f"no {name}": without(name) for name in good if name != "do_remote_prefill"}
    cases |= {f"{name} is null": good | {name: None} for name in good if name != "do_remote_prefill"}
    wrong_types: tuple[object, ...] = (-1, 1.5, [], {}, "", True)
    for name in ("remote_engine_id", "remote_host", "remote_port", "transfer_id", "tp_size"):
        cases |= {f"{name} is {value!r}": good | {name: value} for value in wrong_types}
    cases |= {
        "both directions": good | {"do_remote_decode": True},
        "flags are words": {"do_remote_prefill": "yes", "do_remote_decode": "no"},
        "nothing but the flag": {"do_remote_prefill": True},
        "an unknown transfer": good | {"transfer_id": "never-prefilled"},
        "a very long transfer id": good | {"transfer_id": LONG},
        "a transfer id with control characters": good | {"transfer_id": "a\n\0b"},
        "a very long engine id": good | {"remote_engine_id": LONG},
        "another engine id": good | {"remote_engine_id": "somebody-else"},
        "a host that is no name": good | {"remote_host": "no such host"},
        "a host that does not resolve": good | {"remote_host": "host.invalid"},
        "a port where nobody listens": good | {"remote_port": 1},
        "a port too large": good | {"remote_port": 70_000},
        "a huge port": good | {"remote_port": 1 << 70},
        "a huge tensor parallel size": good | {"tp_size": 1 << 40},
        "another tensor parallel size": good | {"tp_size": 64},
        "an unknown mode": good | {"transfer_mode": "carrier pigeon"},
        "a negative epoch": good | {"epoch": -1},
        "block ids of an unknown size": good | {"remote_block_ids": [[10**9, -5, 0]]},
        "block ids that are words": good | {"remote_block_ids": "all"},
        "unknown keys": good | {"baton": {"colour": ["red", None, 1e300]}},
        "deep nesting": good | {"remote_block_ids": nested(60)},
    }
    return cases


def nested(depth: int) -> object:
    found: object = 0
    for _ in range(depth):
        found = [found]
    return found


def bad_producer_params() -> dict[str, object]:
    """Return `kv_transfer_params` for a prefill engine by what is wrong with them."""
    good: dict[str, object] = {"do_remote_decode": True, "transfer_id": "nobody-comes"}
    return {
        "nobody comes": good,
        "no transfer id": {"do_remote_decode": True},
        "a transfer id that is a number": good | {"transfer_id": 5},
        "a very long transfer id": good | {"transfer_id": LONG},
        "the wrong direction": {"do_remote_prefill": True, "transfer_id": "wrong-way"},
        "flags are words": {"do_remote_decode": "please"},
        "an empty object": {},
    }


def junk_messages(rng: random.Random) -> list[bytes]:
    """Return bytes to throw at a port."""
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 4096,
        struct.pack(">I", 0),
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 1000,
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000,
        struct.pack(">I", 5) + b"\x91\xa5hello"[:5],
        b"\x92\xa5hello\xc4\x10" + b"n" * 16,
        *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(40)),
    ]


def throw(host: str, port: int, message: bytes, wait_s: float = 0.05) -> None:
    """Send bytes to a port and close, whatever comes back."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(message)
            connection.settimeout(wait_s)
            connection.recv(4096)
    except OSError:
        return
