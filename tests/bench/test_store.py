"""The store appends, resumes, survives a half-written line and refuses to mix settings."""

from pathlib import Path

import pytest

from bench import canned
from kvbaton.base.errors import ConfigError
from kvbaton.bench.store import CellKey, Store
from kvbaton.workload.record import Skipped, TokenCheck


def test_reopened_store_holds_what_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for record in canned.records():
        store.append(record)

    assert Store(tmp_path).records == tuple(canned.records())


def test_cells_are_done_when_measured_or_skipped_for_good(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(canned.cell("ours-push"))
    store.append(Skipped("ours-pull", 0, "none", 2048, 0.4, "rho", True))
    store.append(Skipped("plain", 0, "none", 2048, 0.4, "a process ended", False))

    assert store.done() == {
        CellKey("ours-push", 0, "none", 2048, 0.4),
        CellKey("ours-pull", 0, "none", 2048, 0.4),
    }


def test_half_written_last_line_is_passed_over_and_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(canned.HEADER)
    with store.path.open("ab") as file:
        file.write(b'{"type":"cell","contend')

    again = Store(tmp_path)
    again.append(canned.cell("plain"))

    assert again.records == (canned.HEADER, canned.cell("plain"))
    assert Store(tmp_path).records == again.records


def test_foreign_line_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"type":"header"}\n')

    with pytest.raises(ConfigError) as caught:
        Store(tmp_path)

    assert "results.jsonl:1" in str(caught.value)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(canned.HEADER)
    store.require_same({"model": "tiny"})

    with pytest.raises(ConfigError) as caught:
        store.require_same({"model": "large"})

    assert caught.value.key == "--model"


def test_last_token_check_of_a_contender_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for equal in (1, 2):
        store.append(TokenCheck("ours-push", "plain", "float32", 2, equal, None, []))

    assert store.checks()["ours-push"].equal == 2
