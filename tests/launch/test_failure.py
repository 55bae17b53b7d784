"""Finding the line that matters in a failed process's log."""

from pathlib import Path

import pytest

from kvbaton.launch.failure import TAIL_LINES, report_failure, root_error


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["fine", "all fine"], None),
        (
            ["Traceback", "    raise ValueError: nothing", "ValueError: bad", "RuntimeError: later"],
            "ValueError: bad",
        ),
        (
            ["api_server.py: error: unrecognized arguments: --x"],
            "api_server.py: error: unrecognized arguments: --x",
        ),
        (
            ["(EngineCore pid=7) ERROR 11-29 [core.py:9] torch.OutOfMemoryError: no room"],
            "(EngineCore pid=7) ERROR 11-29 [core.py:9] torch.OutOfMemoryError: no room",
        ),
        (
            ["INFO skipped: ImportError: no flash", "DeprecationWarning: old", "OSError: disk"],
            "OSError: disk",
        ),
        (["see ValueError for more"], None),
    ],
)
def test_root_error_is_the_first_real_one(lines: list[str], expected: str | None) -> None:
    assert root_error(lines) == expected


def test_report_shows_cause_and_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("KeyError: 'early'\n" + "".join(f"line {n}\n" for n in range(100)), encoding="utf-8")
    report = report_failure("decode-0", "exit status 1", log)

    assert report.root == "KeyError: 'early'"
    assert len(report.tail) == TAIL_LINES
    assert report.render().splitlines()[0] == "decode-0 failed: exit status 1"
    assert report.render().endswith("| line 99")


def test_report_without_a_log_still_says_what_failed(tmp_path: Path) -> None:
    report = report_failure("router", "ended by SIGKILL", tmp_path / "none.log")

    assert (report.root, report.tail) == (None, ())
    assert "router failed: ended by SIGKILL" in report.render()
