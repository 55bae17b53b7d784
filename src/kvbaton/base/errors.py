"""The error tree.

KvbatonError
|- ConfigError            bad settings, found before anything starts: key, value, allowed
|- ProtocolError          LocalProtocolError: our bug, state unchanged
|                         RemoteProtocolError: the peer's message is not acceptable
|- IncompatiblePeer       field, ours, theirs
`- TransportError         every transport error is one: UnknownHandle, UnregisteredRange, PeerUnreachable, TransferFailed
"""

from enum import StrEnum


class KvbatonError(Exception):
    """Root of every error kvbaton raises on purpose."""


class ConfigError(KvbatonError):
    """A setting is missing, unknown or out of range.

    Attributes:
        key: the setting as the user writes it.
        value: what was found.
        allowed: what would have been accepted.
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}={value!r} is not valid: expected {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class ProtocolError(KvbatonError):
    """A message or event does not fit the state it meets."""


class LocalProtocolError(ProtocolError):
    """We misused a state machine; its state is unchanged."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that cannot be accepted."""


class IncompatiblePeer(KvbatonError):
    """Two engines must not exchange KV because something that has to match differs.

    Attributes:
        field: what differs, in the words a user configures it by.
        ours: our value.
        theirs: the peer's value.
    """

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field} differs: ours is {ours}, the peer's is {theirs}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class TransportError(KvbatonError):
    """The transport refused or lost an operation."""


class UnknownHandle(TransportError):
    """A transfer handle was never issued or was released already."""


class UnregisteredRange(TransportError):
    """A descriptor lies outside every registered region of its side."""


class PeerUnreachable(TransportError):
    """The remote agent is unknown, gone or refuses the connection."""


class TransferFailed(TransportError):
    """A transfer could not be posted or ended in an error."""


class FailureReason(StrEnum):
    """Why a handoff did not commit; the label of the failure counters, so the set is closed."""

    ABORTED = "aborted"  # the consumer's request was aborted
    PREFILL_ABORTED = "prefill_aborted"  # the producer's request ended without usable KV
    PREEMPTED = "preempted"  # the producer lost blocks before they were sent
    UNKNOWN_TRANSFER = "unknown_transfer"  # no prefill by that transfer_id within the deadline
    ALREADY_CLAIMED = "already_claimed"  # another consumer holds this handoff
    STALE_EPOCH = "stale_epoch"  # a newer registration replaced this one
    LEASE_EXPIRED = "lease_expired"  # nobody registered, or the consumer fell silent
    DEADLINE = "deadline"  # the handoff's own deadline passed
    PEER_UNREACHABLE = "peer_unreachable"  # the side channel could not be opened
    PEER_LOST = "peer_lost"  # the peer's process is gone
    PEER_SILENT = "peer_silent"  # heartbeats stopped; the process may be frozen
    INCOMPATIBLE = "incompatible"  # fingerprints, layouts or block lists do not fit
    TRANSFER_FAILED = "transfer_failed"  # the transport reported an error
    CHECKSUM = "checksum"  # verify mode found a difference
    PROTOCOL = "protocol"  # the peer broke the protocol
    RELEASED = "released"  # the consumer needs nothing (not an error)
    INTERNAL = "internal"  # a bug of ours, contained
