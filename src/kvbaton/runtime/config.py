"""Settings of a courier; parsed and checked by the shell that starts it."""

from dataclasses import dataclass, field
from pathlib import Path

from kvbaton.protocol.peer import Heartbeat


@dataclass(frozen=True, slots=True)
class CourierConfig:
    """How one worker rank moves KV.

    Attributes:
        host: address this rank listens on and tells its peers.
        secret: shared secret of the side channel, or None.
        verify: compare checksums of every block before committing.
        stream: send blocks while the prefill computes; otherwise the whole request when it has ended.
        park_s: how long a registration waits for a prefill nobody has heard of.
        lease_s: how long finished blocks wait for a consumer, and sent ones for its word.
        max_in_flight: WRITEs posted at once per handoff.
        poll_min_s: shortest pause between polls while something is in flight.
        poll_max_s: longest pause between polls while a handoff is open.
        dead_drain_s: how long to keep receiving after a peer died before its bytes are taken as drained.
        heartbeat: times of the peers.
        trace_file: append one JSON object per ended handoff here, or None.
    """

    host: str
    secret: bytes | None = None
    verify: bool = False
    stream: bool = True
    park_s: float = 60.0
    lease_s: float = 30.0
    max_in_flight: int = 2
    poll_min_s: float = 0.0003
    poll_max_s: float = 0.003
    dead_drain_s: float = 0.5
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    trace_file: Path | None = None
