"""Namespaces are planned as data: what is made, how the link is shaped, and what a dead run left behind."""

import itertools

import pytest

from kvbaton.bench.namespaces import Names, inside, plan_down, plan_link, plan_up, stale
from kvbaton.workload.cells import Link, parse_link

NAMES = Names.of(4_194_304)  # the largest process id Linux gives


def test_names_fit_the_kernels_limits() -> None:
    assert len(NAMES.prefill_device) <= 15
    assert len(NAMES.decode_device) <= 15
    assert NAMES.prefill_device != NAMES.decode_device


def test_up_makes_both_namespaces_with_an_address_each() -> None:
    commands = plan_up(NAMES)

    assert ("ip", "netns", "add", NAMES.prefill) in commands
    assert ("ip", "netns", "add", NAMES.decode) in commands
    for namespace, address in ((NAMES.prefill, NAMES.prefill_address), (NAMES.decode, NAMES.decode_address)):
        mine = [command for command in commands if command[:3] == ("ip", "-n", namespace)]
        assert any(f"{address}/30" in command for command in mine)
        assert any(command[-2:] == ("lo", "up") for command in mine)


def test_down_removes_everything_up_made() -> None:
    made = {command[3] for command in plan_up(NAMES) if command[:3] == ("ip", "netns", "add")}

    assert {command[3] for command in plan_down(NAMES)} == made


@pytest.mark.parametrize("text", ["64kbit", "200mbit", "400mbit", "25gbit"])
def test_limited_link_is_shaped_on_both_ends(text: str) -> None:
    link = parse_link(text)
    commands = plan_link(NAMES, link)

    assert [command[2] for command in commands] == [NAMES.prefill, NAMES.decode]
    for command in commands:
        words = dict(itertools.pairwise(command))
        assert words["rate"] == f"{link.bits_per_s:.0f}bit"
        assert int(words["limit"]) > int(words["burst"]) >= 32_768


def test_unlimited_link_has_no_shaper() -> None:
    commands = plan_link(NAMES, Link())

    assert len(commands) == 2
    assert all("tbf" not in command for command in commands)


def test_program_runs_in_its_namespace_or_ours() -> None:
    assert inside("a", ["x", "-y"]) == ("ip", "netns", "exec", "a", "x", "-y")
    assert inside(None, ["x", "-y"]) == ("x", "-y")


def test_stale_namespaces_are_those_of_dead_makers_only() -> None:
    listed = ["kvbaton-p-10", "kvbaton-d-10", "kvbaton-p-11", "other-10", "kvbaton-p-x", "kvbaton-q-10"]

    assert stale(listed, alive=[11, 12]) == ["kvbaton-p-10", "kvbaton-d-10"]
