"""Mode: push or pull, a value on a handoff; this module is the only place that maps it to who posts."""

from enum import StrEnum


class Mode(StrEnum):
    """How the bytes of one handoff move."""

    PUSH = "push"  # the producer WRITEs
    PULL = "pull"  # the consumer READs


def producer_posts(mode: Mode) -> bool:
    """Whether the producer is the initiator (otherwise the consumer is)."""
    return mode is Mode.PUSH
