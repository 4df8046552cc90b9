# SPDX-License-Identifier: Apache-2.0
"""``commrt draw FILE.json``: a picture of one step of a run that was recorded with ``commrt train --trace``."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from commrt.cli.figures import new_figure, require_format, save
from commrt.cli.timelines import WARM_STEPS, Span, read
from commrt.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_typical", "run"]

COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "wait": "#cb181d",
    "optimizer": "#bdbdbd",
    "bucket": "#74c476",
    "hop": "#fd8d3c",
    "combine": "#6a51a3",
}
"""Of ranges, each drawn over those before it; what is green of a bucket is packing and unpacking."""
THIN = {"wait"}
MOST_RANKS = 32


class Window(NamedTuple):
    """A step of all ranks."""

    step: int
    begin_ms: float
    end_ms: float


def run(file: str, step: int | None, out: str) -> None:
    """Draw `step` of the run in `file`, or one that took as long as most; raises `UsageError`."""
    require_format(out)
    spans = read(file)
    windows = {window.step: window for window in _windows(spans)}
    if not windows:
        raise UsageError(f"{file} holds no training step: record one with commrt train --trace")
    if step is not None and step not in windows:
        raise UsageError(f"--step {step}: {file} holds steps {min(windows)} to {max(windows)}")
    save(_draw(spans, _typical([*windows.values()]) if step is None else windows[step], Path(file).name), out)


def draw_typical(spans: Sequence[Span], name: str) -> Figure | None:
    """A step that took as long as most; None if there is none. Raises `UsageError` for too many ranks."""
    windows = _windows(spans)
    return _draw(spans, _typical(windows), name) if windows else None


def _windows(spans: Sequence[Span]) -> list[Window]:
    """Each step from where the first rank had ended the one before to where the last has ended it."""
    optimized: defaultdict[int, list[float]] = defaultdict(list)
    ends: defaultdict[int, list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.end_ms):
        if span.name == "optimizer":
            optimized[span.rank].append(span.end_ms)
    for span in spans:
        if span.name == "wait" and span.step is not None:
            ends[span.step].append(_first_after(span.end_ms, optimized[span.rank]))
    if not ends:  # gossip and DDP wait for no step of a number: each rank's are counted
        for its_ends_ms in optimized.values():
            for step, end_ms in enumerate(its_ends_ms):
                ends[step].append(end_ms)
    return [Window(step, min(ends[before]), max(ends[step])) for before, step in pairwise(sorted(ends))]


def _first_after(end_ms: float, later_ms: Sequence[float]) -> float:
    """Where the optimizer's step after a wait ended, if it was recorded; else the wait."""
    place = bisect(later_ms, end_ms)
    return later_ms[place] if place < len(later_ms) else end_ms


def _typical(windows: Sequence[Window]) -> Window:
    late = windows[WARM_STEPS:] or windows
    middle = median_low(window.end_ms - window.begin_ms for window in late)
    return next(window for window in late if window.end_ms - window.begin_ms == middle)


def _draw(spans: Sequence[Span], window: Window, name: str) -> Figure:
    ranks = sorted({span.rank for span in spans})
    if len(ranks) > MOST_RANKS:
        raise UsageError(f"{len(ranks)} ranks are too many for a picture: at most {MOST_RANKS}")
    shown = [span for span in spans if span.end_ms > window.begin_ms and span.begin_ms < window.end_ms]
    figure, axes = new_figure(10, 1.3 + 0.75 * len(ranks))
    for kind in COLOURS:
        for place, rank in enumerate(ranks):
            bars = [span for span in shown if (span.rank, span.name) == (rank, kind)]
            _draw_bars(axes, 2.4 * place + (1.0 if kind in {"bucket", "hop", "combine"} else 0.0), bars, window)
    axes.set_yticks([2.4 * place + 0.95 for place in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(2.4 * len(ranks), -0.3)
    axes.set_xlim(0, window.end_ms - window.begin_ms)
    axes.set_xlabel("ms")
    axes.set_title(f"{name}, step {window.step}: {window.end_ms - window.begin_ms:.2f} ms", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = _handles({span.name for span in shown})
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9)
    return figure


def _draw_bars(axes: Axes, top: float, bars: Sequence[Span], window: Window) -> None:
    if bars:
        kind = bars[0].name
        spans = [(bar.begin_ms - window.begin_ms, bar.end_ms - bar.begin_ms) for bar in bars]
        place = (top + 0.62, 0.28) if kind in THIN else (top, 0.9)
        axes.broken_barh(spans, place, color=COLOURS[kind], ec="w", lw=0.2, clip_on=True)


def _handles(kinds: Collection[str]) -> list[Any]:
    """Of the colours that are there."""
    from matplotlib.patches import Patch  # noqa: PLC0415  # heavy, and an extra

    words = {"bucket": "pack, unpack", "wait": "not hidden"}
    return [Patch(color=colour, label=words.get(kind, kind)) for kind, colour in COLOURS.items() if kind in kinds]
