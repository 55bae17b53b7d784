"""Page: the report as one HTML file with its plots inside; it opens anywhere and asks no server for anything."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvbaton.bench import markdown
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.bench.summary import Group, Metric, Report, Row
from kvbaton.bench.svg import Bar, Point, Segment, Series, line_plot, waterfall
from kvbaton.workload.record import Request

STYLE: Final = """
:root{--ink:#1d232b;--soft:#66707d;--line:#dde2e8;--page:#fff;--p:#8fb4e3;--w:#c9ced6;--e:#e08a3c}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#98a2b0;--line:#333b46;--page:#14181d;--p:#4a7ab5;--w:#4d5661;--e:#d07a2c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.4rem;border-top:1px solid var(--line);padding-top:1.2rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:1rem}svg{width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:12.5px;font-variant-numeric:tabular-nums;margin:.6rem 0}
td,th{padding:.25rem .55rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{color:var(--soft);font-weight:600;white-space:normal}
.key span{display:inline-block;margin:0 1rem .2rem 0;font-size:13px}.key i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.35em}
.t{font:600 13px system-ui,sans-serif;fill:var(--ink)}.a{font:11.5px system-ui,sans-serif;fill:var(--soft)}
.g{stroke:var(--line)}.k{stroke:var(--ink);stroke-width:1}.p{fill:var(--p);background:var(--p)}.w{fill:var(--w);background:var(--w)}.e{fill:var(--e);background:var(--e)}
.b{padding:0 .4em;border-radius:3px;color:#111}.soft{color:var(--soft);font-size:13px}
"""


def render(report: Report) -> str:
    """The whole page."""
    body = ["<h1>kvbaton bench</h1>", "<ul class='soft'>"]
    body += [f"<li>{_inline(line.removeprefix('- '))}</li>" for line in markdown.conditions(report)]
    body += [
        "</ul>",
        *(f"<p>{_inline(line)}</p>" for line in markdown.check_lines(report)),
        _key(report.rows),
    ]
    for group in markdown.groups(report):
        rows = [row for row in report.rows if row.group == group]
        body += _section(group, rows)
    skipped = markdown.skipped_lines(report)
    if skipped:
        body += [
            "<h2>Not measured</h2><ul>",
            *(f"<li>{_inline(line.removeprefix('- '))}</li>" for line in skipped[2:]),
            "</ul>",
        ]
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>kvbaton bench</title><style>{STYLE}</style>{''.join(body)}</html>\n"
    )


def series_of(rows: Iterable[Row], metric: Metric) -> list[Series]:
    """A metric's medians against the rate, by contender; in milliseconds."""
    by_contender: dict[str, list[Point]] = {}
    for row in rows:
        figure = row.figures.get(metric)
        if figure is not None:
            low, high = figure.medians_s.low * 1e3, figure.medians_s.high * 1e3
            point = Point(row.rate_per_s or 0.0, low, figure.median_s * 1e3, high)
            by_contender.setdefault(row.contender, []).append(point)
    return [
        Series(
            CONTENDERS[key].label, CONTENDERS[key].colour, tuple(sorted(points, key=lambda point: point.x))
        )
        for key, points in by_contender.items()
        if key in CONTENDERS
    ]


def bar_of(row: Row, request: Request) -> Bar:
    """One request's waterfall in milliseconds, on the router's clock; without a router all is prefill until the first token."""
    steps = {name: at_s * 1e3 for name, at_s in request.steps_s.items()}
    sent, done, first = (steps.get(name) for name in ("prefill_sent", "prefill_done", "decode_first_byte"))
    if sent is None or done is None or first is None:
        first = request.ttft_s * 1e3
        segments = [Segment("p", "until the first token", 0.0, first)]
    else:
        segments = [
            Segment("w", "router, before the prefill leg", 0.0, sent),
            Segment("p", "prefill leg", sent, done),
            Segment("e", "exposed handoff", done, max(first, done)),
        ]
    ticks = [first]
    for gap_s in request.itls_s:
        ticks.append(ticks[-1] + gap_s * 1e3)
    return Bar(markdown.label(row), tuple(segments), tuple(ticks))


def _section(group: Group, rows: Sequence[Row]) -> list[str]:
    parts = [f"<h2>{html.escape(markdown.heading(group))}</h2><div class='plots'>"]
    parts += [
        line_plot(f"{metric.value}, median", series_of(rows, metric), "requests per second", "ms")
        for metric in (Metric.TTFT, Metric.TPOT, Metric.EXPOSED, Metric.PREFILL)
    ]
    parts.append("</div>")
    loaded = [row for row in rows if row.rate_per_s is not None and row.example is not None]
    if loaded:
        rate = min(row.rate_per_s or 0.0 for row in loaded)
        bars = [
            bar_of(row, row.example) for row in loaded if row.rate_per_s == rate and row.example is not None
        ]
        parts.append(
            f"<p class='soft'>One request per contender at {rate:g}/s, the one with the median TTFT: "
            "<span class='b w'>router</span> <span class='b p'>prefill leg</span> <span class='b e'>exposed handoff</span> "
            "and a line per token.</p>" + waterfall(bars, "ms")
        )
    for head, cells in (
        (markdown.LATENCY_HEAD, [markdown.latency_cells(row) for row in rows]),
        (markdown.COST_HEAD, [markdown.cost_cells(row) for row in rows if row.contender != "plain"]),
    ):
        parts.append(_table(head, cells))
    parts += [_ratio_table(line) for line in _blocks(markdown.ratio_lines(rows))]
    notes = [line for line in markdown.note_lines(rows) if line]
    if notes:
        parts.append(
            "<ul class='soft'>"
            + "".join(f"<li>{_inline(note.removeprefix('- '))}</li>" for note in notes)
            + "</ul>"
        )
    return parts


def _key(rows: Sequence[Row]) -> str:
    keys = [key for key in CONTENDERS if any(row.contender == key for row in rows)]
    spans = [
        f"<span><i style='background:{CONTENDERS[key].colour}'></i>{html.escape(CONTENDERS[key].label)}</span>"
        for key in keys
    ]
    return f"<p class='key'>{''.join(spans)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{_inline(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{heads}</tr>{lines}</table></div>"


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    """Cut the Markdown of ratios into one block per baseline."""
    blocks: list[list[str]] = []
    for line in lines:
        if line.startswith("Ratio"):
            blocks.append([])
        if line:
            blocks[-1].append(line)
    return blocks


def _ratio_table(block: Sequence[str]) -> str:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1:]]
    return f"<p class='soft'>{_inline(block[0])}</p>" + _table(rows[0], rows[2:])


def _inline(text: str) -> str:
    """Escape, and turn Markdown's bold into HTML's."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
