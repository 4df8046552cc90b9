# SPDX-License-Identifier: Apache-2.0
"""Pictures of schedules: ranks over steps, and an arrow for each transfer.

Returns figures of matplotlib; writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np

from commrt.errors import UsageError
from commrt.schedule import COPY, Combine, Schedule, Step
from commrt.tools.pictures.figures import MAX_RANKS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_STEPS = 130
CHUNKS = ["#2171b5", "#41b6e6", "#8c6bb1", "#e6550d", "#fdb441"]
"""Colours from the first chunk to the last, for colour-blind eyes too, on light and dark."""
SIZE_LIMIT = f"a picture can show {MAX_RANKS} ranks and {MAX_STEPS} steps"


def draw_schedule(schedule: Schedule) -> Figure:
    """Draw a line per rank, a column per step, an arrow per transfer, coloured by its first chunk.

    Dashed arrows are copied at the receiver, the others are added or mixed. Raise `UsageError` for
    a schedule that is too large for a picture.
    """
    steps = _require_small(schedule)
    figure, axes = new_figure(2.2 + 0.95 * max(len(steps), 2), 1.6 + 0.32 * schedule.ranks)
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415  # new_figure asked for it

    colours = LinearSegmentedColormap.from_list("chunks", CHUNKS)(
        np.linspace(0, 1, max(schedule.chunks, 2))
    )
    for number, step in enumerate(steps):
        _draw_transfers(axes, number, step, schedule.ranks, colours)
    for number, (begin, end, name) in enumerate(_phases(steps)):
        if number % 2:
            axes.axvspan(begin, end, color="0.95", lw=0, zorder=0)
        axes.text((begin + end) / 2, -0.75, name, ha="center", va="bottom", fontsize=9)
    axes.set_xlim(0, max(len(steps), 1))
    axes.set_ylim(schedule.ranks - 0.4, -1.3)
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    axes.set_yticks(range(schedule.ranks), names, fontsize=9)
    axes.set_xticks(np.arange(len(steps)) + 0.5, map(str, range(len(steps))))
    axes.set_xlabel("step")
    title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.chunks} chunks, {len(steps)} steps"
    axes.set_title(title, fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _require_small(schedule: Schedule) -> list[Step]:
    """Return all steps; raise `UsageError` before making more than a picture can show."""
    if schedule.ranks > MAX_RANKS:
        raise UsageError(f"{schedule.name} has {schedule.ranks} ranks: {SIZE_LIMIT}")
    steps = [step.canonical() for step in islice(schedule.checked_steps(), MAX_STEPS + 1)]
    if len(steps) > MAX_STEPS:
        raise UsageError(f"{schedule.name} has more than {MAX_STEPS} steps: {SIZE_LIMIT}")
    return steps


def _draw_transfers(axes: Axes, number: int, step: Step, ranks: int, colours: np.ndarray) -> None:
    for rank in range(ranks):
        axes.plot([number, number + 1], [rank, rank], color="0.85", lw=0.6, zorder=1)
    arrow = {"arrowstyle": "-|>", "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    for src, dst, lo, _, combine, _ in zip(*step.columns, strict=True):
        look = {"color": colours[lo], "ls": "-" if combine != COPY else (0, (4, 2))}
        begin = (number + 0.1, src)
        end = (number + 0.9, dst)
        axes.annotate("", xy=end, xytext=begin, arrowprops=arrow | look, zorder=3)


def _phases(steps: Sequence[Step]) -> Iterator[tuple[int, int, str]]:
    """Return begin, end and name of each run of steps with equal transfers and combination."""

    def traits(number: int) -> tuple[bytes, bytes, str]:
        step = steps[number]
        names = {Combine(combine).name.lower() for combine in step.combine}
        return step.src.tobytes(), step.dst.tobytes(), " and ".join(sorted(names))

    for (_, _, name), group in groupby(range(len(steps)), traits):
        numbers = list(group)
        yield numbers[0], numbers[-1] + 1, name
