"""The way to tell a producer that nobody will fetch a prefilled request's KV."""

from typing import Protocol

from kvbaton.base.ids import TransferId
from kvbaton.policy.view import ProducerIdentity


class Releaser(Protocol):
    """Gives a producer its blocks back before the lease would."""

    async def release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        """Release what `transfer_id` holds at the producer.

        Must be harmless when nothing is held. Errors may be raised; the lease is the fallback.
        """


class LeaseOnly:
    """Leaves abandoned blocks to the producer's lease, for engines that offer no release."""

    async def release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        """Do nothing."""
