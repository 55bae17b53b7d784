"""The operations page names every connector setting and every metric of an engine."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_operations_page_names_every_setting() -> None:
    config = pytest.importorskip("kvbaton.connector.config", reason="needs vLLM")
    known = set(config._Extra.__struct_fields__) - {"kv_lease_duration"}
    table = PAGE.split("## Connector settings")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}

    assert named == known


def test_operations_page_names_every_counter_and_phase() -> None:
    metrics = pytest.importorskip("kvbaton.connector.metrics", reason="needs vLLM")
    missing = [f"kvbaton:{name}_total" for name in metrics.COUNTERS if f"kvbaton:{name}_total" not in PAGE]
    missing += [name for name in metrics.PHASES if f"kvbaton:{name}econds" not in PAGE]

    assert not missing
