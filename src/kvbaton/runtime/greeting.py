"""Greeting: the first messages on a connection, up to knowing who is at the other end.

Both sides are sans-I/O: they take a message and return the messages to send.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.base.errors import IncompatiblePeer, RemoteProtocolError
from kvbaton.kv.layout import Layout, require_same_shape
from kvbaton.wire.messages import AnyMessage, Challenge, Hello, Identity, Introduce, Lookup, Refused, Welcome
from kvbaton.wire.secret import DIALLER, LISTENER, prove, require_proof
from kvbaton.wire.translate import layout_from_wire, require_same_fingerprint

_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """A rank that has shown who it is and fits.

    Attributes:
        identity: as it introduced itself.
        layout: its KV layout.
    """

    identity: Identity
    layout: Layout


def meet(ours: Identity, layout: Layout, theirs: Identity) -> Acquaintance:
    """Check that two ranks can exchange KV.

    Raises:
        IncompatiblePeer: names the field that differs.
        RemoteProtocolError: the peer's layout is nonsense.
    """
    require_same_fingerprint(ours.fingerprint, theirs.fingerprint)
    for field, mine, other in (
        ("tensor parallel size", ours.tp_size, theirs.tp_size),
        ("pipeline parallel size", ours.pp_size, theirs.pp_size),
        ("tensor parallel rank", ours.tp, theirs.tp),
        ("pipeline parallel rank", ours.pp, theirs.pp),
    ):
        if mine != other:
            raise IncompatiblePeer(field, str(mine), str(other))
    their_layout = layout_from_wire(theirs.layout)
    require_same_shape(layout, their_layout)
    return Acquaintance(theirs, their_layout)


class DiallerGreeting:
    """Our side of a connection we opened.

    Owner: courier. Lifetime: until the conversation proper starts.
    """

    def __init__(self, secret: bytes | None, ask: Callable[[bytes], AnyMessage]) -> None:
        """Args: secret: shared, or None. ask: builds Lookup or Introduce from our proof."""
        self._secret = secret
        self._ask = ask
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    def hello(self) -> Hello:
        """First message."""
        return Hello(self._nonce)

    def answer(self, challenge: Challenge) -> AnyMessage:
        """Second message. Raises RemoteProtocolError if the listener does not know the secret."""
        require_proof(self._secret, challenge.proof, LISTENER, self._nonce, challenge.nonce)
        return self._ask(prove(self._secret, DIALLER, self._nonce, challenge.nonce))


class ListenerGreeting:
    """Our side of a connection somebody opened to us.

    Owner: courier, or the directory's thread.
    """

    def __init__(self, secret: bytes | None) -> None:
        """Args: secret: shared, or None."""
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._their_nonce: bytes | None = None

    def challenge(self, hello: Hello) -> Challenge:
        """Answer to Hello. Raises RemoteProtocolError on a second one."""
        if self._their_nonce is not None:
            raise RemoteProtocolError("two greetings on one connection")
        self._their_nonce = hello.nonce
        return Challenge(self._nonce, prove(self._secret, LISTENER, hello.nonce, self._nonce))

    def admit(self, message: Introduce | Lookup) -> None:
        """Check the dialler's proof. Raises RemoteProtocolError."""
        if self._their_nonce is None:
            raise RemoteProtocolError("the dialler did not greet")
        require_proof(self._secret, message.proof, DIALLER, self._their_nonce, self._nonce)


def refusal(error: IncompatiblePeer | RemoteProtocolError) -> Refused:
    """What to tell a dialler before hanging up."""
    if isinstance(error, IncompatiblePeer):
        return Refused(
            "incompatible", str(error)[:4000], error.field[:500], error.ours[:4000], error.theirs[:4000]
        )
    return Refused("protocol", str(error)[:4000])


def welcome(ours: Identity) -> Welcome:
    """Last message of a good greeting."""
    return Welcome(ours)
