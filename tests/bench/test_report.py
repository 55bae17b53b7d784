"""Reports are computed from records alone, and say what must not be overlooked."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import canned
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.bench.markdown import render
from kvbaton.bench.page import bar_of, series_of
from kvbaton.bench.page import render as render_page
from kvbaton.bench.report import write_report
from kvbaton.bench.summary import Metric, Row, summarise_records
from kvbaton.bench.svg import nice_ceiling
from kvbaton.workload.record import TokenCheck

REPORT = summarise_records(canned.records())


def row_of(contender: str, rate_per_s: float | None = 0.4) -> Row:
    return next(row for row in REPORT.rows if (row.contender, row.rate_per_s) == (contender, rate_per_s))


def test_row_has_the_median_of_its_repeats() -> None:
    row = row_of("upstream-pull")
    exposed = row.figures[Metric.EXPOSED]

    assert row.num_repeats == 3
    assert row.num_requests == 24
    assert exposed.median_s == pytest.approx(0.1, rel=0.1)
    assert exposed.medians_s.low <= exposed.median_s <= exposed.medians_s.high <= exposed.p99_s


def test_ratio_is_taken_against_the_baseline_in_the_same_cell() -> None:
    ratio = row_of("ours-stream").ratios["upstream-pull", Metric.EXPOSED]

    assert ratio.middle == pytest.approx(0.2, rel=0.15)
    assert ratio.low <= ratio.middle <= ratio.high
    assert not row_of("upstream-pull").ratios


def test_costs_are_per_request() -> None:
    costs = row_of("ours-stream").costs

    assert costs.hook_wall_s == pytest.approx({"decode": 0.2, "prefill": 0.1})
    assert costs.hook_cpu_s["prefill"] == pytest.approx(0.05)
    assert costs.step_cpu_p99_s == {("decode", "worker"): pytest.approx(0.0004)}
    assert costs.nixl_engine_thread_s == pytest.approx(0.1)
    assert costs.descriptors == 128
    assert costs.transfers == 1
    assert costs.cpu_s["prefill"] == pytest.approx(1.0)


def test_cell_measured_twice_counts_once() -> None:
    again = summarise_records([*canned.records(), canned.cell("plain", rate_per_s=0.4)])

    assert (
        next(row for row in again.rows if row.contender == "plain" and row.rate_per_s == 0.4).num_repeats == 3
    )


def test_failed_requests_are_counted_and_left_out() -> None:
    result = canned.cell("ours-push")
    broken = canned.request(99, 50.0, 1.0, __import__("random").Random(1), mode="push")
    broken = type(broken)(**{**{f: getattr(broken, f) for f in broken.__struct_fields__}, "error": "reset"})
    fields = {f: getattr(result, f) for f in result.__struct_fields__} | {
        "requests": [*result.requests, broken]
    }

    row = summarise_records([type(result)(**fields)]).rows[0]

    assert (row.num_failed, row.num_requests) == (1, 9)
    assert row.figures[Metric.TTFT].p99_s < 1.0


def test_load_of_nine_tenths_is_marked_not_steady() -> None:
    text = render(summarise_records([canned.HEADER, canned.cell("ours-push", rate_per_s=2.3, prefill_s=0.4)]))

    assert "**not steady**" in text


def test_report_states_conditions_and_what_is_missing() -> None:
    text = render(REPORT)

    for expected in (
        "abc123",
        "seed 7",
        "vllm 0.32.0",
        "two cores",
        "rho 0.95 is not below 0.9",
        "one at a time",
    ):
        assert expected in text


def test_patched_contender_is_labelled_everywhere() -> None:
    report = summarise_records(
        [canned.HEADER, canned.cell("upstream-pull-quiet"), canned.cell("ours-stream")]
    )

    assert "PATCHED" in render(report)
    assert render_page(report).count("PATCHED") >= 3


def test_wrong_tokens_are_said_first() -> None:
    check = TokenCheck("ours-push", "plain", "float32", 8, 7, "prompt 3", [])
    text = render(summarise_records([canned.HEADER, check]))

    assert "**ours-push gave wrong tokens**" in text


def test_missing_check_is_said() -> None:
    assert "**not** compared" in render(summarise_records([canned.HEADER, canned.cell("plain")]))


def test_page_needs_nothing_from_outside() -> None:
    page = render_page(REPORT)

    assert not re.search(r"(src|href)=|<script|https?://|@import|url\(", page)
    assert page.count("<svg") == 5


def test_plots_are_well_formed() -> None:
    for svg in re.findall(r"<svg.*?</svg>", render_page(REPORT), flags=re.DOTALL):
        ElementTree.fromstring(svg)


def test_series_hold_every_rate_of_a_contender() -> None:
    series = series_of(REPORT.rows, Metric.TTFT)
    ours = next(one for one in series if one.label == CONTENDERS["ours-stream"].label)

    assert [point.x for point in ours.points] == [0.0, 0.4, 0.8]
    assert all(point.low <= point.middle <= point.high for point in ours.points)


def test_waterfall_ends_the_prefill_where_the_handoff_begins() -> None:
    row = row_of("upstream-pull")
    assert row.example is not None
    bar = bar_of(row, row.example)

    assert [segment.kind for segment in bar.segments] == ["w", "p", "e"]
    assert bar.segments[1].end == bar.segments[2].start
    assert bar.segments[2].end == bar.ticks[0]
    assert len(bar.ticks) == row.example.output_tokens


def test_waterfall_of_one_engine_is_one_stretch() -> None:
    row = row_of("plain")
    assert row.example is not None

    assert len(bar_of(row, row.example).segments) == 1


def test_files_are_written(tmp_path: Path) -> None:
    table, page = write_report(tmp_path / "new", canned.records())

    assert table.read_text(encoding="utf-8").startswith("# kvbaton bench")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 1), (1, 1), (1.01, 1.5), (37, 40), (99, 100), (0.012, 0.015), (500, 500)]
)
def test_axis_ends_at_a_round_number(value: float, expected: float) -> None:
    assert nice_ceiling(value) == pytest.approx(expected)


def test_report_of_nothing_is_a_report() -> None:
    assert "No run is recorded" in render(summarise_records([]))
    assert "No run is recorded" in render_page(summarise_records([]))
