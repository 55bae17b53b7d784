"""The handoff table: joining what the router and the engines noted, and showing what is there."""

import json
from pathlib import Path

from kvbaton.launch.handoffs import (
    HandoffRow,
    RouterTimeline,
    TraceEntry,
    join,
    parse_timeline,
    read_traces,
    render_table,
)

TIMELINE = RouterTimeline(
    "req-1",
    "t-1",
    "push",
    "load",
    None,
    1,
    {"prefill_done": 0.5, "decode_sent": 0.01, "decode_first_byte": 0.512},
)


def report(**attempt: object) -> str:
    return json.dumps({"outcome": "ok", "attempts": [{"request_id": "old"}, attempt]})


def test_timeline_is_read_from_the_last_attempt() -> None:
    parsed = parse_timeline(
        report(request_id="req-1", transfer_id="t-1", mode="push", steps_s={"last_byte": 2, "x": None})
    )

    assert parsed is not None
    assert (parsed.request_id, parsed.transfer_id, parsed.num_attempts) == ("req-1", "t-1", 2)
    assert dict(parsed.steps_s) == {"last_byte": 2.0}


def test_timeline_of_anything_else_is_absent() -> None:
    bodies = ["", "[]", "{}", '{"attempts": []}', '{"attempts": [3]}', '{"attempts": 3}']

    assert [parse_timeline(body) for body in bodies] == [None] * len(bodies)


def test_traces_skip_what_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"transfer_id": "t-1", "side": "producer", "bytes": 8}\n[1]\n{"transf', encoding="utf-8")
    entries = read_traces([path, tmp_path / "missing.jsonl"])

    assert [(entry.transfer_id, entry.numbers["bytes"]) for entry in entries] == [("t-1", 8.0)]


def test_join_matches_transfer_id_or_a_lengthened_request_id() -> None:
    by_transfer = TraceEntry("t-1", None, "producer", None)
    by_request = TraceEntry(None, "chatcmpl-req-1-0", "consumer", None)
    other = TraceEntry("t-2", "req-2", "producer", None)

    assert join(TIMELINE, [other, by_transfer, by_request]) == (by_transfer, by_request)
    assert join(None, [by_transfer]) == ()


def test_table_shows_sums_over_ranks_and_the_exposed_part() -> None:
    traces = [
        TraceEntry(
            "t-1",
            None,
            "producer",
            "done",
            {"bytes": 1e6, "streamed_bytes": 5e5, "transfers": 3, "tail_s": 0.004},
        ),
        TraceEntry(
            "t-1",
            None,
            "producer",
            "done",
            {"bytes": 1e6, "streamed_bytes": 1e6, "transfers": 4, "tail_s": 0.007},
        ),
    ]
    row = HandoffRow("long", 3000, 16, 0.52, TIMELINE, traces)

    assert row.cells() == ("long", "push", "3000", "16", "520", "500", "12", "7", "2.0", "7", "75%")


def test_table_leaves_blank_what_nobody_noted() -> None:
    row = HandoffRow("short", None, 4, None, None, ())
    lines = render_table([row]).splitlines()

    assert row.cells()[1:3] == ("-", "-")
    assert lines[0].startswith("request")
    assert lines[-1].startswith("short")


def test_table_shows_a_failure_in_place_of_the_mode() -> None:
    failed = RouterTimeline("r", None, "push", None, "decode refused", 2)

    assert HandoffRow("x", 1, 0, None, failed, ()).cells()[1] == "decode refused"
