# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib, and the coordinates of the charts that the page draws as SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import ceil, floor, isfinite, log10
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from commrt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "LineChart",
    "Point",
    "StepGrid",
    "merge_steps",
    "new_figure",
    "shares_by_column",
    "step_ticks",
    "steps_per_column",
    "svg_of",
    "ticks",
]

MAX_COLUMNS = 160
"""Columns of a chart; if there are more steps, several steps share a column."""
CHART_WIDTH, CHART_HEIGHT = 684, 198
"""Of a line chart, in pixels, without the names of its axes."""
PAGE_COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--page)",
    "#f2f2f2": "var(--band)",
    "#d9d9d9": "var(--rule)",
}
"""What the page's style has for the black, white and grey of a figure."""
DARK = 75
"""Brightness, of 255, below which a colour cannot be seen on a dark page."""
MIN_WIDTH_PX, PX_PER_POINT = 540, 1.35
"""On a narrow page a wide figure scrolls; on a wide page a figure grows up to so many pixels per point."""


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of this size in inches; raise `UsageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure as New  # noqa: PLC0415  # heavy, and an extra
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'commrt[draw]'") from error
    figure = New(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def svg_of(figure: Figure, prefix: str) -> str:
    """Return `figure` as an SVG element for a light or dark page; its ids begin with `prefix`, its text stays text."""
    from matplotlib import rc_context  # noqa: PLC0415  # heavy, and an extra

    out = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r" xmlns(:xlink)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: PAGE_COLOURS.get(found[0]) or _for_both(found[0]), svg)
    width = 72 * figure.get_figwidth()
    size = f"min-width: {min(width, MIN_WIDTH_PX):.0f}px; max-width: {PX_PER_POINT * width:.0f}px"
    return svg.replace("<svg ", f'<svg class="picture" style="{size}" ', 1)


def _for_both(colour: str) -> str:
    """Return `colour`, with a lighter one for dark pages if it is dark.

    >>> _for_both("#9ecae1"), _for_both("#3d358b")
    ('#9ecae1', 'light-dark(#3d358b, #9e9ac5)')
    """
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    if 0.3 * red + 0.59 * green + 0.11 * blue > DARK:
        return colour
    lighter = "".join(f"{(part + 255) // 2:02x}" for part in (red, green, blue))
    return f"light-dark({colour}, #{lighter})"


class Point(NamedTuple):
    """Values of the steps from `begin` to before `end`."""

    begin: int
    end: int
    mean: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Place on the axis of steps."""
        return (self.begin + self.end - 1) / 2


def steps_per_column(steps: int) -> int:
    """Return how many steps share a column of a chart."""
    return max(ceil(steps / MAX_COLUMNS), 1)


def merge_steps(values: Iterable[tuple[int, float]], end: int) -> list[Point]:
    """Return the points of a chart from pairs of (step, value); `end` is one past the last step.

    >>> merge_steps([(0, 1.0), (0, 3.0), (1, 5.0)], end=2)
    [Point(begin=0, end=1, mean=2.0, low=1.0, high=3.0), Point(begin=1, end=2, mean=5.0, low=5.0, high=5.0)]
    """
    width = steps_per_column(end)
    columns: dict[int, list[float]] = {}
    for step, value in values:
        if isfinite(value):
            columns.setdefault(step // width, []).append(value)
    return [
        Point(
            column * width, min((column + 1) * width, max(end, column * width + 1)), fmean(each), min(each), max(each)
        )
        for column, each in sorted(columns.items())
    ]


def ticks(high: float, most: int = 6) -> list[float]:
    """Return up to about `most` round numbers from 0 to `high`, which is positive.

    >>> ticks(2.3), ticks(619)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 200.0, 400.0, 600.0])
    """
    power = 10.0 ** floor(log10(high / most))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= high / most)
    return [round(width * number, 12) for number in range(floor(high / width + 1e-9) + 1)]


def step_ticks(end: int) -> list[int]:
    """Return round numbers of the steps before `end`."""
    return [int(step) for step in ticks(max(end - 1, 1), 10) if step == int(step)]


class LineChart(NamedTuple):
    """Lines over the steps before `end`, for values from 0 to `high`."""

    title: str
    unit: str
    lines: Sequence[tuple[str, Sequence[Point]]]
    """Names and points."""
    end: int
    high: float

    def x(self, step: float) -> float:
        """Return the place of a step."""
        return round(CHART_WIDTH * step / max(self.end - 1, 1), 1)

    def y(self, value: float) -> float:
        """Return the place of a value; a value out of range is drawn at the edge."""
        return round(CHART_HEIGHT * (1 - min(max(value / self.high, 0.0), 1.0)), 1)

    def curve(self, points: Iterable[Point]) -> str:
        """Return the line through the means, for a polyline."""
        return " ".join(f"{self.x(point.middle):g},{self.y(point.mean):g}" for point in points)

    def band(self, points: Sequence[Point]) -> str:
        """Return the outline from the highest to the lowest values, for a polygon."""
        lowest = [point._replace(mean=point.low) for point in reversed(points)]
        return self.curve([*(point._replace(mean=point.high) for point in points), *lowest])


class StepGrid(NamedTuple):
    """A grid with a row per rank and a column per `width` steps, which shows who took part."""

    title: str
    names: Sequence[str]
    shares: Sequence[Sequence[float | None]]
    """[ranks][columns]: share of the column's steps; None if no step of it is known."""
    width: int
    end: int


def shares_by_column(members_by_step: Mapping[int, frozenset[int]], ranks: int, end: int) -> list[list[float | None]]:
    """Return [ranks][columns] for a `StepGrid` of the steps before `end`.

    >>> shares_by_column({0: frozenset({0, 1}), 2: frozenset({1})}, ranks=2, end=3)
    [[1.0, None, 0.0], [1.0, None, 1.0]]
    """
    width = steps_per_column(end)
    columns: list[list[frozenset[int]]] = [[] for _ in range(ceil(end / width))]
    for step, members in members_by_step.items():
        if step < end:
            columns[step // width].append(members)
    return [
        [fmean(rank in members for members in column) if column else None for column in columns]
        for rank in range(ranks)
    ]
