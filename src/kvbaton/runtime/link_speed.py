"""Link speed: what transfers cost and how fast KV is made, measured as it happens; decides whether sending layer by layer pays."""

from typing import Final

_WEIGHT: Final = 0.2
_MARGIN: Final = 2.0
_MIN_BYTES: Final = 1 << 16


class LinkSpeed:
    """Moving averages over all peers of one rank.

    Owner: courier; `tail_pays` only reads three numbers and may be called from any thread.
    """

    def __init__(self) -> None:
        """Know nothing: until transfers were measured, the layer tail is taken to pay."""
        self.post_s: float | None = None
        self.bytes_per_s: float | None = None
        self.made_bytes_per_s: float | None = None

    def posted(self, duration_s: float) -> None:
        """Planning and posting one transfer took so long."""
        self.post_s = _mix(self.post_s, duration_s)

    def landed(self, num_bytes: int, duration_s: float) -> None:
        """A transfer took so long from its post to its end; small ones say more about polling than about the link."""
        if num_bytes >= _MIN_BYTES and duration_s > 0:
            self.bytes_per_s = _mix(self.bytes_per_s, num_bytes / duration_s)

    def computed(self, num_bytes: float, duration_s: float) -> None:
        """A step of a prompt, which was not its first, made so much KV."""
        if num_bytes > 0 and duration_s > 0:
            self.made_bytes_per_s = _mix(self.made_bytes_per_s, num_bytes / duration_s)

    def tail_pays(self, num_bytes: int, num_regions: int, *, ended: bool) -> bool:
        """Whether the time on the wire that layer by layer can hide exceeds what the extra posts cost.

        In a step that does not end its prompt there is something to hide only if the link is slow: whole, this step's KV leaves
        during the next step, and the last one's waits behind it. With W for the time on the wire of one step's KV and C for
        that step, 2 W - C are left when the prompt has ended; one layer's W where each step went layer by layer.
        """
        if self.post_s is None or self.bytes_per_s is None:
            return True
        if not ended and self.made_bytes_per_s is not None and self.bytes_per_s > 2 * self.made_bytes_per_s:
            return False
        return num_bytes / self.bytes_per_s > _MARGIN * self.post_s * num_regions


def _mix(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
