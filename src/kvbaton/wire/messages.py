"""Messages: what two engines say to each other on the side channel.

Every struct is frozen and tagged; new fields go last and have defaults. Three conversations use them:

    directory   Hello -> Challenge -> Lookup -> Directory            (also: Lookup then Release, for routers)
    rank        Hello -> Challenge -> Introduce -> Welcome | Refused (then handoffs, both ways)
    handoff     Register, Progress, Offer, Sealed, Received, Confirmed, Failed, Cancel, Cancelled, Release, Ping, Pong
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.base.errors import RemoteProtocolError
from kvbaton.base.ids import MAX_TRANSFER_ID_CHARS

Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
TransferIdText = Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=64)]
Proof = Annotated[bytes, Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Root of everything that fits in a frame."""


# --- greeting ---------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """First words of whoever dialled."""

    nonce: Nonce


class Challenge(Message, frozen=True, tag="challenge"):
    """Answer to Hello; `proof` shows that the listener knows the secret, empty where none is set."""

    nonce: Nonce
    proof: Proof = b""


class Lookup(Message, frozen=True, tag="lookup"):
    """Ask an engine's directory where its ranks listen."""

    proof: Proof = b""


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one worker listens."""

    pp: Count
    tp: Count
    host: Name
    port: Annotated[int, Meta(ge=1, le=65535)]
    boot_epoch: Count


class Directory(Message, frozen=True, tag="directory"):
    """Who lives at this address."""

    engine_id: Name
    tp_size: Count
    pp_size: Count
    ranks: Annotated[list[RankAddress], Meta(max_length=4096)]


class WireGroup(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group of a layout."""

    kind: Name
    block_tokens: Count


class WireRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region of a layout."""

    base: Count
    length_bytes: Count
    block_bytes: Count
    stride_bytes: Count
    group: Count
    device: Count


class WireLayout(msgspec.Struct, frozen=True, array_like=True):
    """A rank's layout, as kv.layout.Layout."""

    memory: Name
    groups: Annotated[list[WireGroup], Meta(max_length=256)]
    regions: Annotated[list[WireRegion], Meta(max_length=65536)]
    num_blocks: Count


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Who a rank is and what its memory looks like."""

    engine_id: Name
    pp: Count
    tp: Count
    tp_size: Count
    pp_size: Count
    boot_epoch: Count
    agent: Name
    agent_metadata: bytes
    layout: WireLayout
    fingerprint: dict[Name, Text]


class Introduce(Message, frozen=True, tag="introduce"):
    """The dialling rank says who it is."""

    identity: Identity
    proof: Proof = b""


class Welcome(Message, frozen=True, tag="welcome"):
    """The listening rank accepts and says who it is."""

    identity: Identity


class Refused(Message, frozen=True, tag="refused"):
    """The listener will not talk; `field`, `ours` and `theirs` are its view of a mismatch."""

    reason: Name
    detail: Text = ""
    field: Name = ""
    ours: Text = ""
    theirs: Text = ""


# --- handoff ----------------------------------------------------------------------------------------------------------


class Key(msgspec.Struct, frozen=True, array_like=True):
    """What both sides match by."""

    transfer_id: TransferIdText
    epoch: Count = 0
    child: Count = 0


class WireBlocks(msgspec.Struct, frozen=True, array_like=True):
    """kv.blocks.GroupBlocks: index of the first block, then ids as little-endian int32."""

    first: Count
    ids: bytes


class Register(Message, frozen=True, tag="register"):
    """Consumer: these blocks of mine are to hold that request's KV.

    `ttl_s` is how long the consumer will wait before it cancels.
    """

    key: Key
    mode: Name
    num_tokens: Count
    prompt_digest: Annotated[bytes, Meta(max_length=64)]
    groups: Annotated[list[WireBlocks], Meta(max_length=256)]
    ttl_s: Annotated[float, Meta(gt=0, le=86400)]
    fan_out: Annotated[int, Meta(ge=1, le=4096)] = 1
    verify: bool = False


class Progress(Message, frozen=True, tag="progress"):
    """Producer: `posted` transfers are on their way; look for their notifications now. `total` once it is known."""

    key: Key
    posted: Count
    total: Count | None = None


class Sealed(Message, frozen=True, tag="sealed"):
    """Producer: all `total` transfers have ended well; `checksums` are CRC-32 values in transfer order when verifying."""

    key: Key
    total: Count
    checksums: bytes = b""


class Offer(Message, frozen=True, tag="offer"):
    """Producer (pull): these blocks of mine are final; the consumer may READ them. Offers do not repeat blocks."""

    key: Key
    seq: Count
    groups: Annotated[list[WireBlocks], Meta(max_length=256)]
    last: bool
    checksums: bytes = b""


class Received(Message, frozen=True, tag="received"):
    """Consumer: everything is here; the producer may free."""

    key: Key


class Confirmed(Message, frozen=True, tag="confirmed"):
    """Producer (pull): the offered blocks were held until Received came, so what was read is right."""

    key: Key


class Failed(Message, frozen=True, tag="failed"):
    """Producer: this handoff will not complete, and none of its transfers is in flight any more."""

    key: Key
    reason: Name
    detail: Text = ""


class Cancel(Message, frozen=True, tag="cancel"):
    """Consumer: stop; answer when nothing of this handoff can write any more."""

    key: Key
    reason: Name


class Cancelled(Message, frozen=True, tag="cancelled"):
    """Producer: none of this handoff's transfers is in flight, and none will be."""

    key: Key


class Release(Message, frozen=True, tag="release"):
    """Whoever knows the transfer_id: nobody will fetch this prefill."""

    key: Key


class Ping(Message, frozen=True, tag="ping"):
    """Heartbeat."""

    seq: Count = 0


class Pong(Message, frozen=True, tag="pong"):
    """Answer to Ping."""

    seq: Count = 0


AnyMessage = (
    Hello
    | Challenge
    | Lookup
    | Directory
    | Introduce
    | Welcome
    | Refused
    | Register
    | Progress
    | Sealed
    | Offer
    | Received
    | Confirmed
    | Failed
    | Cancel
    | Cancelled
    | Release
    | Ping
    | Pong
)


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Notification that travels with a WRITE: transfer `seq` of a handoff; `total` once the producer knows it."""

    key: Key
    seq: Count
    total: Count | None = None


# what the decoder raises on foreign bytes; fields of newer versions are skipped, however deeply they nest
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
_WRITTEN = msgspec.msgpack.Decoder(Written)


def encode(message: AnyMessage | Written) -> bytes:
    """Serialise one message."""
    return _ENCODER.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Read one message. Raises RemoteProtocolError on anything that is not exactly one."""
    try:
        return _DECODER.decode(payload)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"a message cannot be read: {error}") from error


def decode_written(payload: bytes) -> Written:
    """Read a transfer notification. Raises RemoteProtocolError."""
    try:
        return _WRITTEN.decode(payload)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"a transfer notification cannot be read: {error}") from error
