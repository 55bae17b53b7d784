"""Logs: our loggers write where vLLM's do, in its format and at its level."""

import logging


def follow_vllm() -> None:
    """Send our records through vLLM's handlers, unless somebody has configured ours."""
    ours, theirs = logging.getLogger("kvbaton"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
