"""HTTP shell in front of prefill and decode engines."""

from kvbaton.router.command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
