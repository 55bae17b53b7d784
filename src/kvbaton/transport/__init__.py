"""Movers: the typed, non-blocking interface and its two implementations, `memory` and `nixl`."""
