"""Cells: one measured point of a benchmark, a prompt length at a rate over a link, and how a user writes it."""

import re
from dataclasses import dataclass

from kvbaton.base.errors import ConfigError

_CELL = re.compile(r"(\d+)@(\d+(?:\.\d+)?)")
_LINK = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """How fast the two engines can talk; `bits_per_s` None is as fast as the machine allows."""

    bits_per_s: float | None = None

    @property
    def name(self) -> str:
        """The link as a user writes it."""
        if self.bits_per_s is None:
            return "none"
        for unit in ("gbit", "mbit"):
            if self.bits_per_s >= _BITS[unit]:
                return f"{self.bits_per_s / _BITS[unit]:g}{unit}"
        return f"{self.bits_per_s / _BITS['kbit']:g}kbit"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Prompts of one length at one rate; `rate_per_s` None sends the next when the last has ended."""

    prompt_tokens: int
    rate_per_s: float | None

    @property
    def name(self) -> str:
        """The cell as a user writes it."""
        return f"{self.prompt_tokens}@{'unloaded' if self.rate_per_s is None else f'{self.rate_per_s:g}'}"


def parse_cell(text: str) -> Cell:
    """Read `TOKENS@RATE`.

    Raises:
        ConfigError: it is not written like that, or a number is zero.
    """
    match = _CELL.fullmatch(text.strip())
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise ConfigError("--cells", text, "TOKENS@REQUESTS_PER_SECOND such as 2048@0.4")
    return Cell(int(match[1]), float(match[2]))


def parse_link(text: str) -> Link:
    """Read `none` or a rate such as `400mbit`.

    Raises:
        ConfigError: it is neither.
    """
    text = text.strip().lower()
    if text == "none":
        return Link()
    match = _LINK.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError("--link", text, "none, or a rate such as 400mbit")
    return Link(float(match[1]) * _BITS[match[2]])
