# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG: lines over steps, and grids of ranks and steps. Colours are the page's, as variables of its style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, isfinite, log10
from statistics import fmean
from typing import NamedTuple

from commrt.cli.markup import Content, Markup, tag

__all__ = ["MOST_BINS", "Line", "Point", "bins", "grid", "line_chart", "matrix", "ticks"]

MOST_BINS = 160
"""Columns of a chart; more steps than this are put together."""
WIDTH, HEIGHT = 760, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
COLOURS = 6
"""In the page's style, var(--line-0) and so on."""
DASHES = (None, "7 4", "2 3", "12 4", "9 3 2 3", "4 4")
"""Runs that are the same to the last bit lie on each other."""


class Point(NamedTuple):
    """Some steps that follow each other."""

    begin: int
    end: int
    mean: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.begin + self.end - 1) / 2


class Line(NamedTuple):
    """A series of points with a name."""

    name: str
    points: Sequence[Point]


def bins(values: Sequence[tuple[int, float]], end: int) -> list[Point]:
    """Pairs of (step, value), put together where there are more steps than a chart shows.

    >>> bins([(0, 1.0), (0, 3.0), (1, 5.0)], end=2)
    [Point(begin=0, end=1, mean=2.0, low=1.0, high=3.0), Point(begin=1, end=2, mean=5.0, low=5.0, high=5.0)]
    """
    width = max(ceil(end / MOST_BINS), 1)
    found: dict[int, list[float]] = {}
    for step, value in values:
        if isfinite(value):
            found.setdefault(step // width, []).append(value)
    return [
        Point(place * width, min((place + 1) * width, max(end, place * width + 1)), fmean(each), min(each), max(each))
        for place, each in sorted(found.items())
    ]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0, 2.3), ticks(0, 619)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 200.0, 400.0, 600.0])
    """
    span = high - low
    if not span > 0:
        return [low]
    raw = span / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = ceil(low / step)
    return [round(step * number, 12) for number in range(first, floor(high / step + 1e-9) + 1)]


def line_chart(title: str, lines: Sequence[Line], unit: str, end: int, top: float | None = None) -> Markup:
    """Lines over steps, from 0 to the highest mean; behind each, pale, from its lowest to its highest value."""
    means = [point.mean for line in lines for point in line.points]
    high = top if top is not None else 1.08 * max(means, default=1.0) or 1.0
    scale = _Scale(max(end, 1), high)
    drawn = [_drawn(line, number % COLOURS, scale, unit) for number, line in enumerate(lines)]
    chart = tag(
        "svg",
        tag("title", title),
        _axes(scale, unit),
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="chart",
    )
    return tag("figure", tag("figcaption", title, _legend(lines)), tag("div", chart, class_="wide"))


class _Scale(NamedTuple):
    """From steps and values to places."""

    end: int
    high: float

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / max(self.end - 1, 1), 1)

    def y(self, value: float) -> float:
        share = min(max(value / self.high, 0.0), 1.0)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def _axes(scale: _Scale, unit: str) -> list[Content]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    rows = [
        (
            tag("line", x1=LEFT, x2=right, y1=scale.y(value), y2=scale.y(value), class_="rule"),
            tag("text", f"{value:g}{unit}", x=LEFT - 6, y=scale.y(value) + 4, class_="end"),
        )
        for value in ticks(0, scale.high)
    ]
    columns = [
        tag("text", f"{step:,.0f}", x=scale.x(step), y=bottom + 16, class_="middle")
        for step in ticks(0, max(scale.end - 1, 1), 10)
        if step == int(step)
    ]
    return [rows, columns, tag("text", "step", x=(LEFT + right) / 2, y=HEIGHT - 6, class_="middle")]


def _drawn(line: Line, colour: int, scale: _Scale, unit: str) -> list[Content]:
    points = line.points
    if not points:
        return []
    edge = [(scale.x(point.middle), scale.y(point.high)) for point in points]
    edge += [(scale.x(point.middle), scale.y(point.low)) for point in reversed(points)]
    stroke, fill = f"stroke: var(--line-{colour})", f"fill: var(--line-{colour})"
    middle = [(scale.x(point.middle), scale.y(point.mean)) for point in points]
    spots = [
        tag("circle", tag("title", _said(line.name, point, unit)), cx=x, cy=y, r=4, class_="spot", style=fill)
        for point, (x, y) in zip(points, middle, strict=True)
    ]
    return [
        tag("polygon", points=_places(edge), class_="band", style=fill),
        tag("polyline", points=_places(middle), class_="line", style=stroke, stroke_dasharray=DASHES[colour]),
        spots,
    ]


def _said(name: str, point: Point, unit: str) -> str:
    steps = f"step {point.begin}" if point.end - point.begin == 1 else f"steps {point.begin} to {point.end - 1}"
    return f"{name}, {steps}: {point.mean:.4g}{unit} ({point.low:.4g} to {point.high:.4g})"


def _places(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _legend(lines: Sequence[Line]) -> list[Content]:
    if len(lines) < 2:
        return []
    return [
        tag("span", tag("i", style=f"background: var(--line-{number % COLOURS})"), line.name, class_="key")
        for number, line in enumerate(lines)
    ]


CELL = 11
NAME = 62


def grid(title: str, rows: Sequence[str], shares: Sequence[Sequence[float | None]], width: int, end: int) -> Markup:
    """A row per rank, a column per `width` steps; a cell is as dark as its share, and empty where nothing is known."""
    columns = max(map(len, shares), default=0)
    size = max(min(760 - NAME, 16 * columns) / max(columns, 1), 2.0)
    cells = [
        tag("rect", tag("title", _cell_said(rows[row], place, share, width, end)), x=round(NAME + size * place, 2),
            y=CELL * 1.6 * row, width=round(size * 0.9, 2), height=round(CELL * 1.3, 1), **_look(share))
        for row, its in enumerate(shares)
        for place, share in enumerate(its)
    ]  # fmt: skip
    names = [tag("text", name, x=NAME - 8, y=CELL * 1.6 * row + 11, class_="end") for row, name in enumerate(rows)]
    bottom = CELL * 1.6 * len(rows)
    marks = [
        tag("text", f"{step:,.0f}", x=round(NAME + size * step / width, 1), y=bottom + 14, class_="middle")
        for step in ticks(0, max(end - 1, 1), 10)
        if step == int(step)
    ]
    across = ceil(NAME + size * columns + 20)
    chart = tag(
        "svg", tag("title", title), cells, names, marks, viewBox=f"0 0 {max(across, 200)} {ceil(bottom + 20)}",
        role="img", class_="chart", style=f"max-width: {max(across, 200)}px",
    )  # fmt: skip
    return tag("figure", tag("figcaption", title), tag("div", chart, class_="wide"))


def _look(share: float | None) -> dict[str, object]:
    if share is None:
        return {"class_": "cell unknown"}
    return {"class_": "cell none"} if share <= 0 else {"class_": "cell", "style": f"opacity: {0.25 + 0.75 * share:.2f}"}


def _cell_said(name: str, place: int, share: float | None, width: int, end: int) -> str:
    last = min((place + 1) * width, end) - 1
    where = f"step {place}" if width == 1 else f"steps {place * width} to {last}"
    return f"{name}, {where}: " + ("not there" if share is None else f"{share:.0%}")


def matrix(
    title: str, names: Sequence[str], counts: Sequence[Sequence[int]], said: Callable[[int, int], str]
) -> Markup:
    """Whole numbers of pairs, as a table with shades."""
    most = max((count for row in counts for count in row), default=0) or 1
    head = tag("tr", tag("th"), [tag("th", name, scope="col") for name in names])
    body = [
        tag("tr", tag("th", names[row], scope="row"), [
            tag("td", count or "·", title=said(row, column), style=f"--share: {count / most:.2f}", class_="shade")
            for column, count in enumerate(counts[row])
        ])
        for row in range(len(names))
    ]  # fmt: skip
    table = tag("table", tag("thead", head), tag("tbody", body))
    return tag("figure", tag("figcaption", title), tag("div", table, class_="wide"))
