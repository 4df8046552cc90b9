# SPDX-License-Identifier: Apache-2.0
"""A picture of times to a loss over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from time_to_target import TimeToTarget  # of this folder

from commrt.tools.pictures.figures import label_ranks, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_times_to_target"]

MARKERS = "osD^vPX*"


def draw_times_to_target(title: str, times: Sequence[TimeToTarget]) -> Figure:
    """Draw times against the number of ranks: a line per method, in a band of its intervals.

    Points are filled where curves were recorded, and hollow where they are predicted.
    """
    figure, axes = new_figure(7.5, 4.6)
    from matplotlib.ticker import LogLocator, NullLocator  # noqa: PLC0415  # after new_figure

    for number, method in enumerate(dict.fromkeys(each.method for each in times)):
        own = sorted((each for each in times if each.method == method), key=lambda each: each.ranks)
        _draw_method(axes, own, f"C{number}", MARKERS[number % len(MARKERS)])
    if not all(each.steps.is_recorded for each in times):
        axes.plot([], [], "o--", color="0.4", mfc="white", label="predicted")
    counts = sorted({each.ranks for each in times})
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    label_ranks(axes, title, counts, "time, s")
    return figure


def _draw_method(axes: Axes, times: Sequence[TimeToTarget], colour: str, marker: str) -> None:
    """Draw the line to a predicted count dashed."""
    ranks = [each.ranks for each in times]
    low_s, seconds, high_s = ([getattr(each, name) for each in times] for name in ("low_s", "seconds", "high_s"))
    if np.isfinite(high_s).all():
        axes.fill_between(ranks, low_s, high_s, color=colour, alpha=0.15, lw=0)
    for place, (one, other) in enumerate(pairwise(times)):
        style = "-" if one.steps.is_recorded and other.steps.is_recorded else "--"
        axes.plot(ranks[place : place + 2], seconds[place : place + 2], style, color=colour, lw=1.5)
    for is_recorded, face, label in ((True, colour, times[0].method), (False, "white", None)):
        shown = [each for each in times if each.steps.is_recorded is is_recorded]
        points = [each.ranks for each in shown], [each.seconds for each in shown]
        axes.plot(*points, marker, ls="", color=colour, mfc=face, ms=6, label=label)
