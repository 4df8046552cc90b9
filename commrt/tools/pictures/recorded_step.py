# SPDX-License-Identifier: Apache-2.0
"""The picture of a recorded training step: the ranges of all ranks as bars over time.

`timelines` finds the steps. Returns a figure of matplotlib; writes no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commrt.errors import UsageError
from commrt.tools.pictures.figures import COLOURS, MAX_RANKS, label_time, new_figure
from commrt.tools.pictures.step_windows import StepWindow, step_windows, typical
from commrt.tools.pictures.timelines import TimelineSpan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMM_RANGES = {"bucket", "hop", "combine"}
LEGEND = {"bucket": "pack, unpack", "wait": "not hidden"}
RANK_HEIGHT = 2.4
"""From the top of one rank to that of the next; the numbers below count down from its top."""
BAR_HEIGHT = 0.9
COMM_AT = 1.0
WAIT_AT = 0.62
WAIT_HEIGHT = 0.28
"""A wait is a thin bar at the lower edge of what computes."""


def draw_recorded_step(
    spans: Sequence[TimelineSpan], name: str, step: int | None = None
) -> Figure | None:
    """Draw `step` of a recorded run, or one of median duration; None if `spans` hold no step.

    Raise `UsageError` for too many ranks, or if `spans` do not hold `step`.
    """
    windows = {window.step: window for window in step_windows(spans)}
    if not windows:
        return None
    if step is not None and step not in windows:
        raise UsageError(f"--step {step}: {name} holds steps {min(windows)} to {max(windows)}")
    return _draw_window(
        spans, typical([*windows.values()]) if step is None else windows[step], name
    )


def _draw_window(spans: Sequence[TimelineSpan], window: StepWindow, name: str) -> Figure:
    ranks = sorted({span.rank for span in spans})
    if len(ranks) > MAX_RANKS:
        raise UsageError(f"{len(ranks)} ranks are too many for a picture: at most {MAX_RANKS}")
    shown = [
        span for span in spans if span.end_ms > window.begin_ms and span.begin_ms < window.end_ms
    ]
    figure, axes = new_figure(10, 1.3 + 0.75 * len(ranks))
    for place, rank in enumerate(ranks):
        for kind in COLOURS:
            ranges = [span for span in shown if (span.rank, span.name) == (rank, kind)]
            _draw_ranges(axes, RANK_HEIGHT * place, kind, ranges, window)
    axes.set_yticks(
        [RANK_HEIGHT * place + 0.95 for place in range(len(ranks))],
        [f"rank {rank}" for rank in ranks],
    )
    axes.set_ylim(RANK_HEIGHT * len(ranks), -0.3)
    axes.set_xlim(0, window.width_ms)
    label_time(axes, f"{name}, step {window.step}: {window.width_ms:.2f} ms")
    from matplotlib.patches import Patch  # noqa: PLC0415  # new_figure has said what to install

    there = [kind for kind in COLOURS if kind in {span.name for span in shown}]
    handles = [Patch(color=COLOURS[kind], label=LEGEND.get(kind, kind)) for kind in there]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9
    )
    return figure


def _draw_ranges(
    axes: Axes, top: float, kind: str, spans: Sequence[TimelineSpan], window: StepWindow
) -> None:
    """Draw one kind of ranges of one rank: communication below the rest, waits as a thin bar."""
    if spans:
        top += COMM_AT if kind in COMM_RANGES else 0.0
        place = (top + WAIT_AT, WAIT_HEIGHT) if kind == "wait" else (top, BAR_HEIGHT)
        bars = [(span.begin_ms - window.begin_ms, span.end_ms - span.begin_ms) for span in spans]
        axes.broken_barh(bars, place, color=COLOURS[kind], ec="w", lw=0.2, clip_on=True)
