# SPDX-License-Identifier: Apache-2.0
"""What pictures share: an empty figure of matplotlib, colours, and axes over ranks or time.

matplotlib is imported when a figure is asked for: it is heavy, and an extra. The functions that
label write to the axes that they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commrt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 64
"""The most ranks that a picture can show one by one."""
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "wait": "#e6550d",
    "optimizer": "#bdbdbd",
    "bucket": "#bcbddc",
    "hop": "#fdae6b",
    "combine": "#6a51a3",
}
"""Of the parts of a step, by name, each drawn over those before it.

Parts of a bucket in its own colour are packing and unpacking.
"""


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of this size in inches; raise `UsageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure as New  # noqa: PLC0415  # heavy, and an extra
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'commrt[draw]'") from error
    figure = New(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def label_ranks(axes: Axes, title: str, ranks: Sequence[int], what: str) -> None:
    """Let `axes` show `what` against numbers of ranks, with a legend."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.set_xlabel("ranks")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def label_time(axes: Axes, title: str) -> None:
    """Let `axes` show rows of bars over milliseconds."""
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
