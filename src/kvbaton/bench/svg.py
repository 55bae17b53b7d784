"""Svg: the plots of the report, as markup that needs no script and no other file.

Colours of text and lines are CSS classes, so that the page decides how they look on dark or light.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 460
HEIGHT: Final = 250
LEFT: Final = 54
RIGHT: Final = 14
TOP: Final = 30
BOTTOM: Final = 40

WATERFALL_WIDTH: Final = 940
LABEL_WIDTH: Final = 290
ROW_HEIGHT: Final = 30
BAR_HEIGHT: Final = 14

Axis = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One value with the range it was seen in."""

    x: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """One contender's points, by rising x."""

    label: str
    colour: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a waterfall's bar, in the plot's unit."""

    kind: str
    title: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One request of a waterfall: what happened when, and when its tokens came."""

    label: str
    segments: tuple[Segment, ...]
    ticks: tuple[float, ...]


def line_plot(title: str, series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Values against x, with whiskers for their range."""
    points = [point for one in series for point in one.points]
    top = nice_ceiling(max((point.high for point in points), default=1.0))
    right = nice_ceiling(max((point.x for point in points), default=1.0))

    def x_of(value: float) -> float:
        return LEFT + 10 + value / right * (WIDTH - LEFT - RIGHT - 20)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [_open(WIDTH, HEIGHT, title), f'<text class="t" x="{LEFT}" y="16">{html.escape(title)}</text>']
    for step in range(5):
        value = top * step / 4
        y = y_of(value)
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="a" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>')
    for value in sorted({point.x for point in points}):
        text = "one at a time" if value == 0 else f"{value:g}"
        anchor = "start" if value == 0 else "middle"
        parts.append(
            f'<text class="a" text-anchor="{anchor}" x="{x_of(value):.1f}" y="{HEIGHT - BOTTOM + 16}">{text}</text>'
        )
    parts.append(
        f'<text class="a" text-anchor="middle" x="{WIDTH / 2}" y="{HEIGHT - 6}">{html.escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="a" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{html.escape(y_label)}</text>'
    )
    for index, one in enumerate(series):
        parts += _series(one, index - (len(series) - 1) / 2, x_of, y_of)
    return "".join([*parts, "</svg>"])


def waterfall(bars: Sequence[Bar], unit: str) -> str:
    """Requests above each other on one time axis; ticks are tokens."""
    last = max(
        (max([s.end for s in bar.segments] + list(bar.ticks), default=0.0) for bar in bars), default=1.0
    )
    right = nice_ceiling(last)
    height = TOP + ROW_HEIGHT * len(bars) + 20

    def x_of(value: float) -> float:
        return LABEL_WIDTH + value / right * (WATERFALL_WIDTH - LABEL_WIDTH - RIGHT)

    parts = [_open(WATERFALL_WIDTH, height, "waterfall of one request per contender")]
    for step in range(6):
        value = right * step / 5
        x = x_of(value)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 14}"/>')
        suffix = f" {unit}" if step == 5 else ""
        parts.append(f'<text class="a" text-anchor="end" x="{x:.1f}" y="14">{value:g}{suffix}</text>')
    for index, bar in enumerate(bars):
        y = TOP + ROW_HEIGHT * index
        parts.append(f'<text class="a" x="0" y="{y + BAR_HEIGHT - 2}">{html.escape(bar.label)}</text>')
        for segment in bar.segments:
            width = max(x_of(segment.end) - x_of(segment.start), 1.0)
            parts.append(
                f'<rect class="{segment.kind}" x="{x_of(segment.start):.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}">'
                f"<title>{html.escape(segment.title)}: {segment.end - segment.start:.1f} {unit}</title></rect>"
            )
        parts += [
            f'<line class="k" x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="{y - 2}" y2="{y + BAR_HEIGHT + 2}"/>'
            for tick in bar.ticks
        ]
    return "".join([*parts, "</svg>"])


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(
        (step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if value <= step * power * (1 + 1e-9)),
        10 * power,
    )


def _open(width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title, quote=True)}">'


def _series(one: Series, offset: float, x_of: Axis, y_of: Axis) -> list[str]:
    """A line with dots and whiskers, moved a little sideways so that equal values do not hide each other."""
    shift = offset * 3.0
    places = [(x_of(point.x) + shift, y_of(point.middle)) for point in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline fill="none" stroke="{one.colour}" stroke-width="1.6" points="{path}"/>']
    for point, (x, y) in zip(one.points, places, strict=True):
        parts.append(
            f'<line stroke="{one.colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{y_of(point.low):.1f}" y2="{y_of(point.high):.1f}"/>'
            f'<circle fill="{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
            f"<title>{html.escape(one.label)}: {point.middle:.1f} ({point.low:.1f}–{point.high:.1f})</title></circle>"
        )
    return parts
