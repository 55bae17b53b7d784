"""Report: writes what the records say, as Markdown and as one HTML page."""

from collections.abc import Iterable
from pathlib import Path

from kvbaton.bench import markdown, page
from kvbaton.bench.summary import summarise_records
from kvbaton.workload.record import Record


def write_report(folder: Path, records: Iterable[Record]) -> tuple[Path, Path]:
    """Write `report.md` and `report.html` and return their paths."""
    report = summarise_records(records)
    folder.mkdir(parents=True, exist_ok=True)
    table, html = folder / "report.md", folder / "report.html"
    table.write_text(markdown.render(report), encoding="utf-8")
    html.write_text(page.render(report), encoding="utf-8")
    return table, html
