"""Draw the state machines in docs/protocol.md from their transition tables.

    python scripts/protocol_diagrams.py          rewrite the page's generated parts
    python scripts/protocol_diagrams.py --check  exit 1 if the page is out of date

A table names the handler of each (state, event). Where a handler can lead is read from its source: the states it returns, directly or
through the machine's own methods. That is an upper bound: a guard inside a handler is not drawn.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from enum import Enum
from pathlib import Path

from kvbaton.protocol.consumer import Consumer, ConsumerState
from kvbaton.protocol.lease import Lease, LeaseState
from kvbaton.protocol.machine import Machine
from kvbaton.protocol.peer import Peer, PeerState
from kvbaton.protocol.producer import Producer, ProducerState

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"
MACHINES: tuple[tuple[type[Machine[Enum]], type[Enum]], ...] = (
    (Consumer, ConsumerState),
    (Producer, ProducerState),
    (Lease, LeaseState),
    (Peer, PeerState),
)
STAY = "(stay)"


class Reach:
    """Which states each method of one machine can return."""

    def __init__(self, machine: type[Machine[Enum]], states: type[Enum]) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(machine)))
        self._states = states.__name__
        self._methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._known: dict[str, set[str]] = {}

    def of(self, method: str) -> set[str]:
        if method not in self._known:
            self._known[method] = set()  # a method that calls itself adds nothing
            body = self._methods[method]
            found: set[str] = set()
            for node in ast.walk(body):
                if isinstance(node, ast.Return) and node.value is not None:
                    found |= self._values(node.value)
            self._known[method] = found
        return self._known[method]

    def _is_state(self, value: ast.Attribute) -> bool:
        return isinstance(value.value, ast.Name) and value.value.id == self._states

    def _values(self, value: ast.expr) -> set[str]:
        match value:
            case ast.IfExp():
                return self._values(value.body) | self._values(value.orelse)
            case ast.Attribute(value=ast.Name(id=name), attr=state) if name == self._states:
                return {state}
            case ast.Attribute(value=ast.Name(id="self"), attr="state"):
                return {STAY}
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=method)) if (
                method in self._methods
            ):
                given = [argument for argument in value.args if isinstance(argument, ast.Attribute)]
                return self.of(method).union(
                    *(self._values(argument) for argument in given if self._is_state(argument))
                )
            case ast.Name():
                return set()  # a parameter: its values are read where the method is called
            case _:
                raise ValueError(f"a handler returns something this script cannot read: {ast.unparse(value)}")


def diagram(machine: type[Machine[Enum]], states: type[Enum]) -> str:
    """One mermaid state diagram; events that lead the same way share an arrow, and those that change nothing are left out."""
    reach = Reach(machine, states)
    labels: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, event), handler in machine.transitions.items():
        for target in sorted(reach.of(handler.__name__)):
            if target not in (STAY, state.name):
                labels[(state.name, target)].append(event.__name__)
    first = next(iter(states)).name
    leaving = {source for source, _ in labels}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for (source, target), events in labels.items():
        lines.append(f"    {source} --> {target}: {', '.join(sorted(set(events)))}")
    lines += [f"    {state.name} --> [*]" for state in states if state.name not in leaving]
    return "\n".join([*lines, "```"])


def generated(page: str) -> str:
    """The page with every generated part drawn afresh."""
    for machine, states in MACHINES:
        name = machine.__name__.lower()
        start, end = f"<!-- generated: {name} -->", "<!-- end -->"
        head, rest = page.split(start)
        page = f"{head}{start}\n{diagram(machine, states)}\n{end}{rest.split(end, 1)[1]}"
    return page


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = generated(old)
    if check:
        if new != old:
            print(f"{PAGE.name} is out of date: run python scripts/protocol_diagrams.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
