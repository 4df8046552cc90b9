# SPDX-License-Identifier: Apache-2.0
"""The picture of a simulated training step: its slowest rank as bars over time, by each way to go.

Returns a figure of matplotlib; writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from commrt.tools.pictures.figures import COLOURS, label_time, new_figure
from commrt.tools.planning.phases import Phase
from commrt.tools.planning.timeline import StepTime
from commrt.tools.planning.workload import FORWARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEXT_HOP = "#fdbe85"
"""Neighbouring exchanges alternate between this colour and that of a hop."""
MAX_NAMED_PHASES = 6
MIN_NAMED_SHARE = 0.06
"""A bar shows its name if it takes at least this share of the picture's width."""
WAY_HEIGHT = 2.6
"""From the top of one way to that of the next; the numbers below count down from its top."""
BAR_HEIGHT = 0.6
EXCHANGE_AT = 0.95
WAIT_AT = 1.72
STEPS_AT = 1.85
TITLE_ROOM = 0.9
LAST_HEIGHT = 2.0
"""Of the last way, below which nothing comes."""


def draw_simulated_step(
    title: str, ways: Mapping[str, StepTime], phases: Sequence[Phase]
) -> Figure:
    """Draw the slowest rank of a simulated step, once for each way to place the exchange.

    The exchange of the first way is divided into `phases`.
    """
    figure, axes = new_figure(10, 1.9 * len(ways))
    axes.set_xlim(0, 1e3 * max(step.seconds for step in ways.values()) * 1.02)
    for place, step in enumerate(ways.values()):
        _draw_slowest_rank(axes, WAY_HEIGHT * place, step, [] if place else phases)
    axes.set_yticks([WAY_HEIGHT * place + 0.5 for place in range(len(ways))], list(ways))
    axes.set_ylim(WAY_HEIGHT * (len(ways) - 1) + LAST_HEIGHT, -TITLE_ROOM)
    label_time(axes, title)
    return figure


def _draw_slowest_rank(axes: Axes, top: float, step: StepTime, phases: Sequence[Phase]) -> None:
    rank = int(step.end_s.argmax())
    computed_ms = 1e3 * step.computed_s[rank]
    end_ms = 1e3 * step.end_s[rank]
    forward_ms = FORWARD * computed_ms
    _draw_bar(axes, top, 0.0, forward_ms, COLOURS["forward"], "forward")
    _draw_bar(axes, top, forward_ms, computed_ms, COLOURS["backward"], "backward")
    for number, act in enumerate(step.buckets):
        begin_ms, packed_ms, exchanged_ms, unpacked_ms = (1e3 * times[rank] for times in act)
        _draw_bar(axes, top + EXCHANGE_AT, begin_ms, unpacked_ms, COLOURS["bucket"])
        parts = [
            (packed_ms + 1e3 * phase.begin_s, packed_ms + 1e3 * phase.end_s) for phase in phases
        ]
        for place, part in enumerate(parts or [(packed_ms, exchanged_ms)], start=number):
            _draw_bar(axes, top + EXCHANGE_AT, *part, (COLOURS["hop"], NEXT_HOP)[place % 2])
    axes.plot(
        [computed_ms, end_ms],
        [top + WAIT_AT] * 2,
        color=COLOURS["wait"],
        lw=3,
        solid_capstyle="butt",
    )
    label = f"{end_ms - computed_ms:.2f} ms not hidden, efficiency {step.efficiency:.1%}"
    axes.text(end_ms, top - 0.08, label, ha="right", va="bottom", fontsize=9, color=COLOURS["wait"])
    if phases:
        axes.text(
            end_ms, top + STEPS_AT, f"steps: {_named(phases)}", ha="right", va="top", fontsize=9
        )


def _draw_bar(
    axes: Axes, top: float, begin_ms: float, end_ms: float, colour: str, label: str = ""
) -> None:
    axes.broken_barh(
        [(begin_ms, end_ms - begin_ms)], (top, BAR_HEIGHT), color=colour, ec="w", lw=0.4
    )
    if end_ms - begin_ms > MIN_NAMED_SHARE * axes.get_xlim()[1]:
        axes.text(
            (begin_ms + end_ms) / 2,
            top + BAR_HEIGHT / 2,
            label,
            ha="center",
            va="center",
            fontsize=9,
        )


def _named(phases: Sequence[Phase]) -> str:
    """Return the steps of each phase, or if there are many, of all that add and all that copy."""
    counts = [(phase.steps, phase.adds) for phase in phases]
    if len(counts) > MAX_NAMED_PHASES:
        counts = [
            (sum(steps for steps, adds in counts if adds is kind), kind) for kind in (True, False)
        ]
    return ", ".join(f"{steps} {'adding' if adds else 'copying'}" for steps, adds in counts)
