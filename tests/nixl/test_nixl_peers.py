"""What a NIXL agent sees of a peer process that is killed, stopped or restarted."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbaton.base.errors import PeerUnreachable, TransportError
from kvbaton.base.ids import AgentName, TransferHandle
from kvbaton.kv.layout import MemoryKind
from kvbaton.testing.agent_process import AgentProcess, Notified, Posted, Sum, Summed, Write
from kvbaton.testing.transport_pair import Pair, Peer, wait_until
from kvbaton.transport.base import Operation, TransferState
from kvbaton.transport.nixl import NixlTransport

pytestmark = pytest.mark.nixl
NUM_BYTES = 32 << 20
STILL_S = 0.3  # how long "stays" is watched
BOUND_S = 10.0  # how soon a death must be noticed


@pytest.fixture(params=["default", "tcp"], autouse=True)
def ucx_tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with what UCX picks between processes of one host, once as between hosts without RDMA."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    if request.param != "default":
        monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def me(ucx_tls: str) -> Iterator[Peer]:
    peer = Peer.start(NixlTransport(AgentName(f"me-{uuid.uuid4()}"), MemoryKind.DRAM), NUM_BYTES)
    yield peer
    peer.transport.close()


@pytest.fixture
def child(ucx_tls: str) -> Iterator[AgentProcess]:
    child = AgentProcess.start(AgentName(f"child-{uuid.uuid4()}"), NUM_BYTES)
    yield child
    child.close()


@dataclass(slots=True)
class NameOnly:
    """Stands where a pair wants the target's transport: only its name is used."""

    name: AgentName


def aim(me: Peer, child: AgentProcess) -> Pair:
    """Connect one way; the child's memory is only an address here."""
    me.transport.connect(child.ready.metadata)
    them = NameOnly(child.name)
    return Pair(me, Peer(them, me.memory, child.ready.base))  # type: ignore[arg-type]


def warmed(me: Peer, child: AgentProcess) -> Pair:
    pair = aim(me, child)
    handle = pair.post(pair.plan((0, 0, 64)), b"warm")
    wait_final(me, handle)

    assert me.transport.poll(handle) is TransferState.DONE
    me.transport.release(handle)
    return pair


def wait_final(me: Peer, handle: TransferHandle, timeout_s: float = BOUND_S) -> None:
    wait_until(lambda: me.transport.poll(handle) is not TransferState.PENDING, timeout_s)


def stays_pending(me: Peer, handle: TransferHandle) -> bool:
    end_s = time.monotonic() + STILL_S
    while time.monotonic() < end_s:
        if me.transport.poll(handle) is not TransferState.PENDING:
            return False
        me.transport.notifications()
    return True


def test_write_to_a_child_is_told_to_it(me: Peer, child: AgentProcess) -> None:
    me.memory[:1000] = 3
    pair = warmed(me, child)
    handle = pair.post(pair.plan((0, 4096, 1000)), b"data")
    wait_final(me, handle)
    payloads = [child.read(Notified).payload for _ in range(2)]
    child.tell(Sum())

    assert payloads == [b"warm", b"data"]
    assert child.read(Summed).total == 3 * 1000 + 3 * 64


def test_peer_killed_during_a_write_fails_it_in_bounded_time(me: Peer, child: AgentProcess) -> None:
    pair = warmed(me, child)
    child.stop()
    handle = pair.post(pair.plan((0, 0, NUM_BYTES)), b"never")
    pending = stays_pending(me, handle)
    child.kill()
    wait_final(me, handle)

    assert pending
    assert me.transport.poll(handle) is TransferState.FAILED
    me.transport.release(handle)
    with pytest.raises(PeerUnreachable):
        pair.post(pair.plan((0, 0, 64)), b"n")


def test_peer_killed_during_a_read_ends_it_in_bounded_time(
    me: Peer, child: AgentProcess, ucx_tls: str
) -> None:
    pair = warmed(me, child)
    child.stop()
    handle = pair.post(pair.plan((0, 0, NUM_BYTES)), b"never", Operation.READ)
    if ucx_tls == "tcp":  # on one host the kernel reads a stopped process's memory for us
        assert stays_pending(me, handle)
    child.kill()
    wait_final(me, handle)

    if ucx_tls == "tcp":
        assert me.transport.poll(handle) is TransferState.FAILED
    me.transport.release(handle)


def test_idle_peer_killed_is_unreachable_at_the_next_post(me: Peer, child: AgentProcess) -> None:
    pair = warmed(me, child)
    child.kill()

    def refused() -> bool:
        try:
            handle = pair.post(pair.plan((0, 0, 64)), b"n")
        except PeerUnreachable:
            return True
        wait_final(me, handle)
        return me.transport.poll(handle) is TransferState.FAILED

    wait_until(refused, BOUND_S)


def test_every_transfer_of_a_killed_peer_fails(me: Peer, child: AgentProcess) -> None:
    pair = warmed(me, child)
    child.stop()
    handles = [pair.post(pair.plan((0, 0, 1 << 20)), b"never") for _ in range(8)]
    child.kill()
    for handle in handles:
        wait_final(me, handle)

    assert {me.transport.poll(handle) for handle in handles} == {TransferState.FAILED}
    for handle in handles:
        me.transport.release(handle)


def test_peer_restarted_under_its_name_is_reached_after_connect(me: Peer, child: AgentProcess) -> None:
    warmed(me, child)
    child.kill()
    again = AgentProcess.start(child.name, NUM_BYTES)
    try:
        warmed(me, again)

        assert again.read(Notified).payload == b"warm"
    finally:
        again.close()


def test_dead_peer_never_met_is_unreachable(me: Peer, child: AgentProcess, ucx_tls: str) -> None:
    child.kill()
    try:
        pair = aim(me, child)
        handle = pair.post(pair.plan((0, 0, 64)), b"n")
    except PeerUnreachable:
        return
    wait_final(me, handle)

    assert me.transport.poll(handle) is TransferState.FAILED


def test_stopped_peer_keeps_a_write_pending_and_gets_it_when_continued(me: Peer, child: AgentProcess) -> None:
    me.memory[:] = 1
    pair = warmed(me, child)
    child.read(Notified)
    child.stop()
    handle = pair.post(pair.plan((0, 0, NUM_BYTES)), b"late")
    pending = stays_pending(me, handle)
    with pytest.raises(TransportError):
        me.transport.release(handle)
    child.resume()
    wait_final(me, handle)
    payload = child.read(Notified).payload
    child.tell(Sum())

    assert pending
    assert me.transport.poll(handle) is TransferState.DONE
    assert payload == b"late"
    assert child.read(Summed).total == NUM_BYTES


def test_stopped_peer_never_met_keeps_a_write_pending(me: Peer, child: AgentProcess) -> None:
    child.stop()
    pair = aim(me, child)
    handle = pair.post(pair.plan((0, 0, 64)), b"hello")
    pending = stays_pending(me, handle)
    child.resume()
    wait_final(me, handle)

    assert pending
    assert me.transport.poll(handle) is TransferState.DONE
    assert child.read(Notified).payload == b"hello"


def test_disconnect_from_a_stopped_peer_fails_its_transfers_and_harms_no_other(
    me: Peer, child: AgentProcess
) -> None:
    pair = warmed(me, child)
    other = AgentProcess.start(AgentName(f"other-{uuid.uuid4()}"), NUM_BYTES)
    try:
        to_other = warmed(me, other)
        child.stop()
        handle = pair.post(pair.plan((0, 0, NUM_BYTES)), b"never")
        began_s = time.monotonic()
        me.transport.disconnect(child.name)
        took_s = time.monotonic() - began_s

        assert took_s < 1
        assert me.transport.poll(handle) is TransferState.FAILED
        me.transport.release(handle)
        done = to_other.post(to_other.plan((0, 0, 4096)), b"fine")
        wait_final(me, done)

        assert me.transport.poll(done) is TransferState.DONE
    finally:
        other.close()


def test_close_with_a_transfer_to_a_stopped_peer_returns(me: Peer, child: AgentProcess) -> None:
    pair = warmed(me, child)
    child.stop()
    pair.post(pair.plan((0, 0, NUM_BYTES)), b"never")
    began_s = time.monotonic()
    me.transport.close()

    assert time.monotonic() - began_s < 2


def test_initiator_killed_in_the_middle_leaves_the_target_alive_and_soon_quiet(
    me: Peer, child: AgentProcess
) -> None:
    """Over TCP bytes that were under way still land after the writer's death, until they are drained by polling."""
    child.tell(Write(me.transport.metadata(), me.base, 64))
    wait_until(lambda: bool(me.transport.notifications()))
    child.tell(Write(me.transport.metadata(), me.base, NUM_BYTES))
    child.read(Posted)
    child.read(Posted)
    child.kill()
    quiet_since_s, seen = time.monotonic(), -1
    end_s = quiet_since_s + 1.0
    while time.monotonic() < end_s:
        me.transport.notifications()
        now = int((me.memory[::4096] == 255).sum())
        if now != seen:
            quiet_since_s, seen = time.monotonic(), now

    assert end_s - quiet_since_s > 0.5


def test_damaged_metadata_is_unreachable_and_harmless(me: Peer, child: AgentProcess) -> None:
    for index in range(len(child.ready.metadata)):
        damaged = bytearray(child.ready.metadata)
        damaged[index] ^= 0x41
        for metadata in (bytes(damaged), child.ready.metadata[:index]):
            with pytest.raises(PeerUnreachable):
                me.transport.connect(metadata)

    warmed(me, child)
