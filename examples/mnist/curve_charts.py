# SPDX-License-Identifier: Apache-2.0
"""Charts of the page: curves over the steps, which ranks counted, and any figure as a data URL."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from commrt.tools.pictures.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["data_url", "draw_curves", "draw_members", "mean_by_column", "steps_per_column"]

MAX_COLUMNS = 160
"""Columns of a chart; if there are more steps, several steps share a column."""
COUNTED, NOT_COUNTED = "#2f6fb5", "#f0b89b"

Curve = Sequence[tuple[int, float]]
"""Pairs of (step, value); a step has a value for each rank."""


def data_url(figure: Figure) -> str:
    """Return `figure` as an SVG for the ``src`` of an image: a page that holds it loads nothing else."""
    out = BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(out.getvalue()).decode()}"


def steps_per_column(steps: int) -> int:
    """Return how many steps share a column of a chart."""
    return max(ceil(steps / MAX_COLUMNS), 1)


def mean_by_column(curve: Curve, width: int) -> tuple[NDArray[np.float64], ...]:
    """Return the first step, the mean, the lowest and the highest value of each `width` steps; without nan and inf.

    >>> [column.tolist() for column in mean_by_column([(0, 1.0), (0, 3.0), (1, 5.0)], width=1)]
    [[0.0, 1.0], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0]]
    """
    steps, values = np.array(sorted(curve), dtype=np.float64).reshape(-1, 2).T
    known = np.isfinite(values)
    columns, begins, counts = np.unique(steps[known] // width, return_index=True, return_counts=True)
    if not len(columns):
        return columns, columns, columns, columns
    means = np.add.reduceat(values[known], begins) / counts
    return columns * width, means, *(each.reduceat(values[known], begins) for each in (np.minimum, np.maximum))


def draw_curves(curves: Mapping[str, Curve], end: int, high: float | None = None) -> Figure:
    """Draw the mean of each curve over the steps before `end`, from 0 to `high`, in a band of its values."""
    figure, axes = new_figure(9.0, 2.8)
    for (name, curve), style in zip(curves.items(), ["-", "--", ":", "-."] * len(curves), strict=False):
        steps, means, lowest, highest = mean_by_column(curve, steps_per_column(end))
        axes.fill_between(steps, lowest, highest, alpha=0.18)
        axes.plot(steps, means, style, label=name)
    axes.set_ylim(0, high)
    axes.set_xlabel("step")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_members(members_by_step: Mapping[int, frozenset[int]], ranks: int, end: int) -> Figure:
    """Draw a row per rank and a column per step, or per some steps: blue where the rank is a member, else orange."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415  # heavy, and an extra

    width = steps_per_column(end)
    known, there = np.zeros(ceil(end / width)), np.zeros((ranks, ceil(end / width)))
    for step, members in members_by_step.items():
        if step < end:
            known[step // width] += 1
            there[[*members], step // width] += 1
    figure, axes = new_figure(9.0, 0.8 + 0.25 * ranks)
    edges = np.append(np.arange(len(known)) * width, end) - 0.5
    colours = LinearSegmentedColormap.from_list("members", [NOT_COUNTED, COUNTED])
    shares = np.divide(there, known, out=np.full_like(there, np.nan), where=known > 0)
    axes.pcolormesh(edges, np.arange(ranks + 1), shares, cmap=colours, vmin=0, vmax=1, ec="w", lw=0.5)
    axes.set_yticks(np.arange(ranks) + 0.5, [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks, 0)
    axes.set_xlabel("step")
    return figure
