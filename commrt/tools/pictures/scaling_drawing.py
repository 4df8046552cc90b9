# SPDX-License-Identifier: Apache-2.0
"""The picture of how algorithms scale: efficiency over the number of ranks.

Returns a figure of matplotlib; writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from commrt.tools.pictures.figures import label_ranks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*"


def draw_scaling(
    title: str, rank_counts: Sequence[int], efficiencies: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw efficiency of a training step (0 to 1) by number of ranks, a line per algorithm."""
    figure, axes = new_figure(7.5, 4.6)
    for (name, efficiency), marker in zip(efficiencies.items(), MARKERS, strict=False):
        axes.plot(rank_counts, [100 * each for each in efficiency], f"{marker}-", label=name, ms=5)
    axes.set_ylim(0, 102)
    label_ranks(axes, title, rank_counts, "efficiency, %")
    return figure
