"""Proofs: each is good for one side, one secret and one pair of nonces."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.wire.secret import DIALLER, LISTENER, prove, require_proof
from strategies import examples

SECRET = b"correct horse"
OURS, THEIRS = bytes(range(32)), bytes(range(100, 132))


def accepted(proof: bytes, side: bytes, *, secret: bytes | None = SECRET) -> bool:
    try:
        require_proof(secret, proof, side, OURS, THEIRS)
    except RemoteProtocolError:
        return False
    return True


@pytest.mark.parametrize("side", [DIALLER, LISTENER])
def test_the_right_proof_is_accepted(side: bytes) -> None:
    assert accepted(prove(SECRET, side, OURS, THEIRS), side)


def test_a_listeners_proof_reflected_back_is_no_diallers_proof() -> None:
    assert not accepted(prove(SECRET, LISTENER, OURS, THEIRS), DIALLER)
    assert not accepted(prove(SECRET, LISTENER, THEIRS, OURS), DIALLER)
    assert not accepted(prove(SECRET, DIALLER, OURS, THEIRS), LISTENER)


def test_a_proof_for_swapped_nonces_is_refused() -> None:
    assert not accepted(prove(SECRET, DIALLER, THEIRS, OURS), DIALLER)


@pytest.mark.parametrize("proof", [b"", b"\x00", bytes(32), prove(b"wrong", DIALLER, OURS, THEIRS)])
def test_a_missing_or_wrong_proof_is_refused(proof: bytes) -> None:
    assert not accepted(proof, DIALLER)


def test_without_a_secret_nothing_is_proved_or_asked() -> None:
    assert prove(None, DIALLER, OURS, THEIRS) == b""
    assert accepted(b"anything", DIALLER, secret=None)


def test_an_empty_secret_is_still_a_secret() -> None:
    assert not accepted(b"", DIALLER, secret=b"")


@given(st.binary(max_size=64))
@examples(100)
def test_random_proofs_are_refused(proof: bytes) -> None:
    assert not accepted(proof, DIALLER)


@given(st.binary(min_size=40, max_size=80), st.integers(16, 24), st.integers(16, 24))
@examples(80)
def test_a_proof_depends_on_where_one_nonce_ends(joined: bytes, split: int, other: int) -> None:
    assume(split != other)

    assert prove(SECRET, LISTENER, joined[:split], joined[split:]) != prove(
        SECRET, LISTENER, joined[:other], joined[other:]
    )
