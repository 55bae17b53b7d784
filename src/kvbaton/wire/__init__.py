"""Bytes between engines: frames, the handshake, handoff messages and transfer notifications."""
