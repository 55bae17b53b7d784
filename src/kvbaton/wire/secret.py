"""Secret: the HMAC proofs by which both ends of a side channel show that they know the shared secret."""

import hashlib
import hmac

from kvbaton.base.errors import RemoteProtocolError

LISTENER = b"listener"
DIALLER = b"dialler"


def prove(secret: bytes | None, side: bytes, nonce_dialler: bytes, nonce_listener: bytes) -> bytes:
    """Return the proof for one side, or nothing where no secret is set."""
    if secret is None:
        return b""
    # the length keeps two pairs of nonces from reading alike once they are joined
    joined = side + b"|" + bytes([len(nonce_dialler)]) + nonce_dialler + nonce_listener
    return hmac.digest(secret, joined, hashlib.sha256)


def require_proof(
    secret: bytes | None, proof: bytes, side: bytes, nonce_dialler: bytes, nonce_listener: bytes
) -> None:
    """Check the other side's proof.

    Raises:
        RemoteProtocolError: a secret is set here and the proof is missing or wrong.
    """
    if secret is None:
        return
    expected = prove(secret, side, nonce_dialler, nonce_listener)
    if not hmac.compare_digest(expected, proof):
        raise RemoteProtocolError("the peer does not know the shared secret (connector setting `secret`)")
