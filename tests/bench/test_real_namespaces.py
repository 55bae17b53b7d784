"""Real namespaces, where this machine lets us make them: they appear, take a rate, carry bytes and are gone again."""

import os
import shutil
import subprocess
import sys

import pytest

from kvbaton.bench.namespaces import Names, Namespaces, NoNamespaces, inside
from kvbaton.workload.cells import Link, parse_link

SEND = "import socket, sys; s = socket.create_connection((sys.argv[1], 9)); s.sendall(bytes(4_000_000)); s.shutdown(1); s.recv(1)"
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 9))
print("listening", flush=True)
peer, _ = listener.accept()
started = time.monotonic()
while peer.recv(1 << 16): pass
print(time.monotonic() - started, flush=True)
"""


def listed() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def namespaces():
    """A pair, or a skip that says what is missing."""
    try:
        with Namespaces(Names.of(os.getpid())) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")


def seconds_to_send(names: Names) -> float:
    """How long four megabytes take from the prefill side to the decode side."""
    argv = inside(names.decode, [sys.executable, "-c", RECEIVE, names.decode_address])
    receiver = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    subprocess.run(inside(names.prefill, [sys.executable, "-c", SEND, names.decode_address]), check=True)
    took = float(receiver.stdout.read())
    receiver.wait()
    receiver.stdout.close()
    return took


def test_limited_link_takes_as_long_as_its_rate_says(namespaces: Namespaces) -> None:
    namespaces.shape(parse_link("40mbit"))
    limited_s = seconds_to_send(namespaces.names)
    namespaces.shape(Link())
    free_s = seconds_to_send(namespaces.names)

    assert limited_s > 0.5  # 0.8 s at the rate, less what the bucket and the buffers hold
    assert free_s < limited_s / 2


def test_leaving_removes_both_even_after_an_error() -> None:
    names = Names.of(os.getpid())

    def fail_inside() -> None:
        with Namespaces(names):
            assert names.prefill in listed()
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            fail_inside()
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")

    assert names.prefill not in listed()
    assert names.decode not in listed()


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_missing_right_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespaces, match=r"root|tc"):
        Namespaces(Names.of(os.getpid())).__enter__()
