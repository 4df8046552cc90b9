# SPDX-License-Identifier: Apache-2.0
"""Pictures of one training step as bars over time, simulated or recorded.

Of a recorded run it also finds the steps, and a typical one. Returns figures; writes no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from commrt.errors import UsageError
from commrt.tools.pictures.figures import MAX_RANKS, new_figure
from commrt.tools.pictures.timelines import WARMUP_STEPS, TimelineSpan
from commrt.tools.planning.phases import Phase
from commrt.tools.planning.timeline import StepTime
from commrt.tools.planning.workload import FORWARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "wait": "#cb181d",
    "optimizer": "#bdbdbd",
    "bucket": "#74c476",
    "hop": "#fd8d3c",
    "combine": "#6a51a3",
}
"""By name of a range, each drawn over those before it.

Green parts of a bucket are packing and unpacking.
"""
NEXT_HOP = "#fdbe85"
"""Neighbouring exchanges alternate between this colour and that of a hop."""
COMM_RANGES = {"bucket", "hop", "combine"}
LEGEND = {"bucket": "pack, unpack", "wait": "not hidden"}
MAX_NAMED_PHASES = 6
MIN_NAMED_SHARE = 0.06
"""A bar shows its name if it takes at least this share of the picture's width."""


def draw_simulated_step(
    title: str, ways: Mapping[str, StepTime], phases: Sequence[Phase]
) -> Figure:
    """Draw the slowest rank of a simulated step, once for each way to place the exchange.

    The exchange of the first way is divided into `phases`.
    """
    figure, axes = new_figure(10, 3.8)
    axes.set_xlim(0, 1e3 * max(step.seconds for step in ways.values()) * 1.02)
    for place, step in enumerate(ways.values()):
        _draw_slowest_rank(axes, 2.6 * place, step, [] if place else phases)
    axes.set_yticks([2.6 * place + 0.5 for place in range(len(ways))], list(ways))
    axes.set_ylim(4.6, -0.9)
    _label_time(axes, title)
    return figure


def _draw_slowest_rank(axes: Axes, top: float, step: StepTime, phases: Sequence[Phase]) -> None:
    rank = int(step.end_s.argmax())
    computed_ms = 1e3 * step.computed_s[rank]
    end_ms = 1e3 * step.end_s[rank]
    forward_ms = FORWARD * computed_ms
    _draw_bar(axes, top, 0.0, forward_ms, COLOURS["forward"], "forward")
    _draw_bar(axes, top, forward_ms, computed_ms, COLOURS["backward"], "backward")
    for number, act in enumerate(step.buckets):
        begin_ms, packed_ms, exchanged_ms, unpacked_ms = (1e3 * times[rank] for times in act[1:])
        _draw_bar(axes, top + 0.95, begin_ms, unpacked_ms, COLOURS["bucket"])
        parts = [
            (packed_ms + 1e3 * phase.begin_s, packed_ms + 1e3 * phase.end_s) for phase in phases
        ]
        for place, part in enumerate(parts or [(packed_ms, exchanged_ms)], start=number):
            _draw_bar(axes, top + 0.95, *part, (COLOURS["hop"], NEXT_HOP)[place % 2])
    axes.plot(
        [computed_ms, end_ms], [top + 1.72] * 2, color=COLOURS["wait"], lw=3, solid_capstyle="butt"
    )
    label = f"{end_ms - computed_ms:.2f} ms not hidden, efficiency {step.efficiency:.1%}"
    axes.text(end_ms, top - 0.08, label, ha="right", va="bottom", fontsize=9, color=COLOURS["wait"])
    if phases:
        axes.text(end_ms, top + 1.85, f"steps: {_named(phases)}", ha="right", va="top", fontsize=9)


def _draw_bar(
    axes: Axes, top: float, begin_ms: float, end_ms: float, colour: str, label: str = ""
) -> None:
    axes.broken_barh([(begin_ms, end_ms - begin_ms)], (top, 0.6), color=colour, ec="w", lw=0.4)
    if end_ms - begin_ms > MIN_NAMED_SHARE * axes.get_xlim()[1]:
        axes.text((begin_ms + end_ms) / 2, top + 0.3, label, ha="center", va="center", fontsize=9)


def _named(phases: Sequence[Phase]) -> str:
    """Return the steps of each phase, or if there are many, of all that add and all that copy."""
    counts = [(phase.steps, phase.adds) for phase in phases]
    if len(counts) > MAX_NAMED_PHASES:
        counts = [
            (sum(steps for steps, adds in counts if adds is kind), kind) for kind in (True, False)
        ]
    return ", ".join(f"{steps} {'adding' if adds else 'copying'}" for steps, adds in counts)


class _Window(NamedTuple):
    """One step of all ranks."""

    step: int
    begin_ms: float
    end_ms: float

    @property
    def width_ms(self) -> float:
        return self.end_ms - self.begin_ms


def draw_recorded_step(
    spans: Sequence[TimelineSpan], name: str, step: int | None = None
) -> Figure | None:
    """Draw `step` of a recorded run, or one of median duration; None if `spans` hold no step.

    Raise `UsageError` for too many ranks, or if `spans` do not hold `step`.
    """
    windows = {window.step: window for window in _windows(spans)}
    if not windows:
        return None
    if step is not None and step not in windows:
        raise UsageError(f"--step {step}: {name} holds steps {min(windows)} to {max(windows)}")
    return _draw_window(
        spans, _typical([*windows.values()]) if step is None else windows[step], name
    )


def _windows(spans: Sequence[TimelineSpan]) -> list[_Window]:
    """Return steps, each from the first rank to end the one before to the last rank to end it."""
    # by rank, the ends of its optimizer steps in ms
    updates: defaultdict[int, list[float]] = defaultdict(list)
    ends_ms: defaultdict[int, list[float]] = defaultdict(list)  # by step
    for span in sorted(spans, key=lambda span: span.end_ms):
        if span.name == "optimizer":
            updates[span.rank].append(span.end_ms)
    for span in spans:
        if span.name == "wait" and span.step is not None:
            ends_ms[span.step].append(
                next((end for end in updates[span.rank] if end > span.end_ms), span.end_ms)
            )
    # waits of gossip and DDP have no step number: count the optimizer's steps of each rank
    if not ends_ms:
        for rank_ends_ms in updates.values():
            for step, end_ms in enumerate(rank_ends_ms):
                ends_ms[step].append(end_ms)
    return [
        _Window(step, min(ends_ms[before]), max(ends_ms[step]))
        for before, step in pairwise(sorted(ends_ms))
    ]


def _typical(windows: Sequence[_Window]) -> _Window:
    """Return a step of median duration, of those after the first."""
    late = windows[WARMUP_STEPS:] or windows
    middle_ms = median_low(window.width_ms for window in late)
    return next(window for window in late if window.width_ms == middle_ms)


def _draw_window(spans: Sequence[TimelineSpan], window: _Window, name: str) -> Figure:
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
            _draw_ranges(axes, 2.4 * place, kind, ranges, window)
    axes.set_yticks(
        [2.4 * place + 0.95 for place in range(len(ranks))], [f"rank {rank}" for rank in ranks]
    )
    axes.set_ylim(2.4 * len(ranks), -0.3)
    axes.set_xlim(0, window.width_ms)
    _label_time(axes, f"{name}, step {window.step}: {window.width_ms:.2f} ms")
    from matplotlib.patches import Patch  # noqa: PLC0415  # new_figure has said what to install

    there = [kind for kind in COLOURS if kind in {span.name for span in shown}]
    handles = [Patch(color=COLOURS[kind], label=LEGEND.get(kind, kind)) for kind in there]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9
    )
    return figure


def _draw_ranges(
    axes: Axes, top: float, kind: str, spans: Sequence[TimelineSpan], window: _Window
) -> None:
    """Draw one kind of ranges of one rank: communication below the rest, waits as a thin bar."""
    if spans:
        top += 1.0 if kind in COMM_RANGES else 0.0
        place = (top + 0.62, 0.28) if kind == "wait" else (top, 0.9)
        bars = [(span.begin_ms - window.begin_ms, span.end_ms - span.begin_ms) for span in spans]
        axes.broken_barh(bars, place, color=COLOURS[kind], ec="w", lw=0.2, clip_on=True)


def _label_time(axes: Axes, title: str) -> None:
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
