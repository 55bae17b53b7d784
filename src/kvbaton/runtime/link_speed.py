"""Link speed: what transfers cost and how fast KV is made, measured as it happens; decides whether sending layer by layer pays."""

import math
from typing import Final

_WEIGHT: Final = 0.2
_LINK_WEIGHT: Final = 0.5
"""Links change: after three transfers a new speed is known within an eighth of the change."""
_PART_COST: Final = 10.0
"""A part costs more than its post: waking up, notifying, polling, and the caches that the computing thread loses to all that. On one
core that both share, 14 parts more made a prefill 40 ms longer where a post took 0.24 ms."""
_LEAST_S: Final = 1e-6
_MIN_BYTES: Final = 1 << 16


class LinkSpeed:
    """Moving averages over all peers of one rank.

    Owner: courier; `tail_parts` only reads and may be called from any thread.

    Attributes:
        post_s: planning and posting a transfer.
        bytes_per_s: of transfers.
        made_bytes_per_s: of prompts being computed.
        is_pushed: the consumer that registered last wants its KV pushed. What is to be pulled leaves in no parts.
    """

    def __init__(self) -> None:
        """Know nothing: until transfers were measured, the layer tail is taken to pay."""
        self.post_s: float | None = None
        self.bytes_per_s: float | None = None
        self.made_bytes_per_s: float | None = None
        self.is_pushed = True

    def posted(self, duration_s: float) -> None:
        """Planning and posting one transfer took so long."""
        self.post_s = _mix(self.post_s, duration_s)

    def landed(self, num_bytes: int, duration_s: float) -> None:
        """A transfer took so long from its post to its end; small ones say more about polling than about the link."""
        if num_bytes >= _MIN_BYTES and duration_s > 0:
            # times are averaged, not rates: a link that has become slow would be taken for fast for long
            known_s = duration_s if self.bytes_per_s is None else num_bytes / self.bytes_per_s
            self.bytes_per_s = num_bytes / _mix(known_s, duration_s, _LINK_WEIGHT)

    def expected_s(self, num_bytes: int) -> float:
        """How long such a transfer should take; 0 until one was measured."""
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s

    def computed(self, num_bytes: float, duration_s: float) -> None:
        """A step of a prompt, which was not its first, made so much KV; a step of a few tokens says nothing about longer ones."""
        if num_bytes >= _MIN_BYTES and duration_s > 0:
            self.made_bytes_per_s = _mix(self.made_bytes_per_s, num_bytes / duration_s)

    def tail_parts(self, num_bytes: int, left_bytes: float, num_regions: int) -> int:
        """In how many parts, a range of layers each, what a step adds should leave while the step runs; 1: after it.

        Let W be the time on the wire of one step's KV, p the cost of a part. Of the step that ends a prompt W / n is left when it is over,
        and n p are paid, so n is the root of W / p. An earlier step's KV leaves while the rest of the prompt is computed. Where that is too
        short, because the last step has few tokens, it goes in so many parts that the last of them fits. And where the link is slower
        than the engine, so that it is what all wait for, its idling during the first step is a loss; half the parts will do to fill it.

        Args:
            num_bytes: so much.
            left_bytes: of the prompt's KV, for later steps to make.
            num_regions: at most so many parts.
        """
        if not self.is_pushed:
            return 1
        if self.post_s is None or self.bytes_per_s is None:
            return max(1, min(num_regions, num_bytes // _MIN_BYTES))  # so large that they will be measured
        wire_s = num_bytes / self.bytes_per_s
        parts = math.isqrt(int(wire_s / max(_PART_COST * self.post_s, _LEAST_S)))
        if left_bytes > 0 and self.made_bytes_per_s is not None:
            hidden_s = left_bytes / self.made_bytes_per_s
            needed = math.ceil(wire_s / hidden_s)
            is_slow = self.bytes_per_s <= self.made_bytes_per_s
            parts = max(min(parts, needed), parts // 2 if is_slow else 1)
        return max(1, min(parts, num_regions))


def _mix(old: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if old is None else old + weight * (new - old)
