"""Markdown: the report as tables for people and for other documents."""

from collections.abc import Sequence

from kvbaton.bench.contenders import BASELINES, CONTENDERS
from kvbaton.bench.summary import COMPARED, Group, Metric, Report, Row
from kvbaton.workload.stats import Spread

BLANK = "–"
LATENCY_HEAD = (
    "contender", "rate/s", "rho", "n", "TTFT mean / median / p99", "TPOT mean / median / p99", "ITL mean / median / p99",
    "prefill leg", "exposed", "tok/s",
)  # fmt: skip
COST_HEAD = (
    "contender", "rate/s", "hooks prefill", "hooks decode", "hook CPU prefill", "hook CPU decode",
    "p99 of a step prefill: scheduler / worker", "p99 of a step decode: scheduler / worker",
    "NIXL on engine threads", "descriptors", "transfers", "CPU s prefill / decode / router",
)  # fmt: skip


def render(report: Report) -> str:
    """The whole report."""
    lines = ["# kvbaton bench", "", *conditions(report), "", *check_lines(report), ""]
    for group in groups(report):
        rows = [row for row in report.rows if row.group == group]
        lines += [f"## {heading(group)}", "", "Milliseconds; each statistic is the median over repeats.", ""]
        lines += table(LATENCY_HEAD, [latency_cells(row) for row in rows])
        lines += ["", *ratio_lines(rows), "Per request, milliseconds unless said:", ""]
        lines += table(COST_HEAD, [cost_cells(row) for row in rows if row.contender != "plain"])
        lines += ["", *note_lines(rows)]
    lines += skipped_lines(report)
    return "\n".join(lines).rstrip() + "\n"


def conditions(report: Report) -> list[str]:
    """What it ran on and with."""
    if not report.headers:
        return ["No run is recorded."]
    last = report.headers[-1]
    commits = ", ".join(dict.fromkeys(header.commit for header in report.headers))
    return [
        f"- Run {report.headers[0].started_at} to {last.started_at} (last start), commit {commits}, seed {last.seed}",
        "- Hardware: " + ", ".join(f"{key} {value}" for key, value in last.hardware.items()),
        "- Versions: " + ", ".join(f"{key} {value}" for key, value in last.versions.items()),
        "- Settings: " + ", ".join(f"{key} {value}" for key, value in last.settings.items()),
        "- Definitions: TTFT, TPOT and ITL are those of vLLM's serving benchmark, which sent the requests. Prefill leg and exposed "
        "handoff (first token minus end of the prefill leg) are taken on the router's clock. Hooks are the connector's methods, "
        "timed by the same wrapper for everyone; hook CPU leaves out waiting, and is also given for the 99th of 100 engine steps (classes 19 % wide). rho is rate times mean unloaded prefill leg.",
    ]


def check_lines(report: Report) -> list[str]:
    """Whether all contenders gave the same tokens."""
    if not report.checks:
        return ["Tokens were **not** compared before timing."]
    lines = [
        f"- **{check.contender} gave wrong tokens**: {check.first_difference} ({check.equal}/{check.prompts} equal)"
        for check in report.checks
        if check.equal < check.prompts
    ]
    same = [check.contender for check in report.checks if check.equal == check.prompts]
    reference = report.checks[0].reference
    if same:
        lines.insert(0, f"Same greedy tokens as {reference} ({report.checks[0].dtype}): {', '.join(same)}.")
    return lines


def groups(report: Report) -> list[Group]:
    """Groups in order, without the ones only the plain engine is in."""
    return list(dict.fromkeys(row.group for row in report.rows))


def heading(group: Group) -> str:
    """A group in words."""
    return f"{group.prompt_tokens} prompt tokens, link {group.link}"


def latency_cells(row: Row) -> tuple[str, ...]:
    """One row of the latency table."""
    failed = f" ({row.num_failed} failed)" if row.num_failed else ""
    return (
        label(row),
        rate_text(row),
        BLANK if row.rho is None else f"{row.rho:.2f}{'' if row.steady else ' **not steady**'}",
        f"{row.num_requests}{failed} in {row.num_repeats}",
        triple(row, Metric.TTFT),
        triple(row, Metric.TPOT),
        triple(row, Metric.ITL),
        single(row, Metric.PREFILL),
        single(row, Metric.EXPOSED),
        f"{row.output_tokens_per_s:.1f}",
    )


def cost_cells(row: Row) -> tuple[str, ...]:
    """One row of the cost table."""
    costs = row.costs
    cpu = " / ".join(
        f"{costs.cpu_s[name]:.2f}" if name in costs.cpu_s else BLANK
        for name in ("prefill", "decode", "router")
    )
    return (
        label(row),
        rate_text(row),
        *(
            BLANK if engine not in by_engine else ms(by_engine[engine])
            for by_engine in (costs.hook_wall_s, costs.hook_cpu_s)
            for engine in ("prefill", "decode")
        ),
        *(
            " / ".join(
                BLANK if (p99_s := costs.step_cpu_p99_s.get((engine, side))) is None else f"{p99_s * 1e3:.2f}"
                for side in ("scheduler", "worker")
            )
            for engine in ("prefill", "decode")
        ),
        ms(costs.nixl_engine_thread_s),
        f"{costs.descriptors:.0f}",
        f"{costs.transfers:.1f}",
        cpu,
    )


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """Ratios of medians against the baselines, with intervals."""
    lines = []
    for baseline in BASELINES:
        shown = [row for row in rows if any(key == baseline for key, _ in row.ratios)]
        if not shown:
            continue
        lines += [f"Ratio to {CONTENDERS[baseline].label} (95 % interval), below 1 is faster:", ""]
        lines += table(
            ("contender", "rate/s", *(metric.value for metric in COMPARED)),
            [
                (
                    label(row),
                    rate_text(row),
                    *(ratio_text(row.ratios.get((baseline, metric))) for metric in COMPARED),
                )
                for row in shown
            ],
        )
        lines.append("")
    return lines


def note_lines(rows: Sequence[Row]) -> list[str]:
    """What must be known about single rows."""
    lines = [f"- {label(row)} at {rate_text(row)}: {note}" for row in rows for note in row.notes]
    return [*lines, ""] if lines else []


def skipped_lines(report: Report) -> list[str]:
    """Cells that have no result."""
    if not report.skipped:
        return []
    lines = ["## Not measured", ""]
    for one in report.skipped:
        rate = "unloaded" if one.rate_per_s is None else f"{one.rate_per_s:g}/s"
        lines.append(
            f"- {one.contender}, {one.prompt_tokens} tokens at {rate}, link {one.link}, repeat {one.repeat + 1}: {one.reason}"
        )
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in rows),
    ]


def label(row: Row) -> str:
    """A contender's name in reports."""
    return CONTENDERS[row.contender].label if row.contender in CONTENDERS else row.contender


def rate_text(row: Row) -> str:
    """A rate, or that there was one request at a time."""
    return "one at a time" if row.rate_per_s is None else f"{row.rate_per_s:g}"


def triple(row: Row, metric: Metric) -> str:
    """Mean, median, p99 and in brackets the range of the repeats' medians."""
    figure = row.figures.get(metric)
    if figure is None:
        return BLANK
    text = f"{ms(figure.mean_s)} / {ms(figure.median_s)} / {ms(figure.p99_s)}"
    return (
        text if row.num_repeats == 1 else f"{text} ({ms(figure.medians_s.low)}–{ms(figure.medians_s.high)})"
    )


def single(row: Row, metric: Metric) -> str:
    """A median with the range of the repeats'."""
    figure = row.figures.get(metric)
    if figure is None:
        return BLANK
    text = ms(figure.median_s)
    return (
        text if row.num_repeats == 1 else f"{text} ({ms(figure.medians_s.low)}–{ms(figure.medians_s.high)})"
    )


def ratio_text(ratio: Spread | None) -> str:
    """A ratio with its interval."""
    return BLANK if ratio is None else f"{ratio.middle:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def ms(value_s: float) -> str:
    """Seconds as milliseconds, three significant digits or whole."""
    value = value_s * 1e3
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
