"""Cells and links read what users write and refuse what cannot be measured."""

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.workload.cells import Cell, Link, parse_cell, parse_link


def test_cell_well_formed_is_read() -> None:
    assert parse_cell(" 2048@0.4 ") == Cell(2048, 0.4)


@pytest.mark.parametrize("text", ["", "2048", "2048@", "@1", "0@1", "2048@0", "2048@-1", "2048@inf", "2k@1"])
def test_cell_malformed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cell(text)

    assert caught.value.value == text


def test_cell_name_is_what_a_user_writes() -> None:
    assert parse_cell(Cell(4096, 0.2).name) == Cell(4096, 0.2)
    assert Cell(4096, None).name == "4096@unloaded"


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("none", None), ("400mbit", 4e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("200MBIT", 2e8)],
)
def test_link_well_formed_is_read(text: str, bits_per_s: float | None) -> None:
    assert parse_link(text) == Link(bits_per_s)


@pytest.mark.parametrize("text", ["", "400", "0mbit", "fast", "-1gbit", "400mbit;rm"])
def test_link_malformed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)


@pytest.mark.parametrize("text", ["none", "400mbit", "2gbit", "64kbit"])
def test_link_name_reads_back(text: str) -> None:
    assert parse_link(parse_link(text).name) == parse_link(text)
