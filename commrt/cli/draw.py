# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: pictures of a schedule, of a simulated training step, and of how algorithms scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from commrt.algorithms.catalogue import ALGORITHMS, GOSSIP, by_name
from commrt.algorithms.gossip import Gossip
from commrt.cli.figures import new_figure, require_format, save
from commrt.cli.pricing import CLUSTER, Case, Estimate, compute_of, workload_of
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.planning import ITEM_NBYTES
from commrt.pricing.simulate import Phase, Pricing
from commrt.pricing.timeline import StepTime, blocking_step, overlapped_step
from commrt.pricing.workload import FORWARD
from commrt.schedule import ADD, COPY, Algorithm, Combine, Schedule, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SCALING", "draw_schedule", "run"]

SCALING = "scaling"

MOST_RANKS, MOST_STEPS = 64, 130
"""Of a schedule that a picture can show."""
ROOM = f"a picture can show {MOST_RANKS} ranks and {MOST_STEPS} steps"
MOST_NAMED = 6
"""Phases that have room for their names; and a bar has room for its own from this part of the picture on."""
LEAST_NAMED = 0.06
WORDS = {ADD: "add", COPY: "copy"}
RANK_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def run(algorithm: Algorithm | None, case: Case, out: str) -> None:
    """Draw how all scale, or the schedule of `algorithm`, or with a model a step with it; raises `UsageError`."""
    require_format(out)
    case.check_numbers()
    if algorithm is None:
        figure = draw_scaling(case)
    elif case.model is None:
        figure = draw_schedule(algorithm.schedule(0, case.ranks))
    else:
        figure = draw_step(algorithm, case)
    save(figure, out)


class _Phase(NamedTuple):
    """Steps that follow each other and move alike."""

    begin: int
    end: int
    word: str


def _phases(steps: Sequence[Step]) -> Iterator[_Phase]:
    def traits(number: int) -> tuple[bytes, bytes, str]:
        step = steps[number]
        words = {WORDS.get(Combine(combine), "mix") for combine in step.combine}
        return step.src.tobytes(), step.dst.tobytes(), " and ".join(sorted(words))

    for (_, _, word), group in groupby(range(len(steps)), traits):
        numbers = list(group)
        yield _Phase(numbers[0], numbers[-1] + 1, word)


def draw_schedule(schedule: Schedule) -> Figure:
    """Who sends what to whom: a line per rank, a column per step, an arrow per transfer in its first chunk's colour."""
    steps = _shown(schedule)
    figure, axes = new_figure(2.2 + 0.95 * max(len(steps), 2), 1.6 + 0.32 * schedule.ranks)
    colours = _colours(schedule.chunks)
    for number, step in enumerate(steps):
        _draw_transfers(axes, number, step, schedule.ranks, colours)
    for number, phase in enumerate(_phases(steps)):
        axes.axvspan(phase.begin, phase.end, color="0.95" if number % 2 else "1.0", zorder=0)
        axes.text((phase.begin + phase.end) / 2, -0.75, phase.word, ha="center", va="bottom", fontsize=9)
    axes.set_xlim(0, max(len(steps), 1))
    axes.set_ylim(schedule.ranks - 0.4, -1.3)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)], fontsize=8)
    axes.set_xticks([number + 0.5 for number in range(len(steps))], [str(number) for number in range(len(steps))])
    axes.set_xlabel("step")
    axes.set_title(
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.chunks} chunks, {len(steps)} steps", fontsize=11
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _shown(schedule: Schedule) -> list[Step]:
    """All steps; raises `UsageError` for more than a picture has room for, before they are made."""
    if schedule.ranks > MOST_RANKS:
        raise UsageError(f"{schedule.name} has {schedule.ranks} ranks: {ROOM}")
    steps = [step.canonical() for step in islice(schedule.played(), MOST_STEPS + 1)]
    if len(steps) > MOST_STEPS:
        raise UsageError(f"{schedule.name} has more than {MOST_STEPS} steps: {ROOM}")
    return steps


def _colours(chunks: int) -> np.ndarray:
    from matplotlib import colormaps  # noqa: PLC0415  # heavy, and an extra

    return np.asarray(colormaps["turbo"](np.linspace(0.05, 0.95, max(chunks, 2))))


def _draw_transfers(axes: Axes, number: int, step: Step, ranks: int, colours: np.ndarray) -> None:
    for rank in range(ranks):
        axes.plot([number, number + 1], [rank, rank], color="0.85", lw=0.6, zorder=1)
    for src, dst, lo, combine in zip(*(c.tolist() for c in (step.src, step.dst, step.lo, step.combine)), strict=True):
        axes.annotate(
            "",
            xy=(number + 0.9, dst),
            xytext=(number + 0.1, src),
            arrowprops={
                "arrowstyle": "-|>",
                "color": colours[lo],
                "lw": 1.4,
                "ls": "-" if combine != COPY else (0, (4, 2)),
                "shrinkA": 0,
                "shrinkB": 0,
                "mutation_scale": 9,
            },
            zorder=3,
        )


def draw_step(algorithm: Algorithm, case: Case) -> Figure:
    """A simulated training step, with the exchange after the backward pass and under it."""
    cluster = Cluster.named(case.cluster or CLUSTER)
    if case.model is None:
        raise UsageError("a training step is of a model: give --model")
    if isinstance(algorithm, Gossip):
        raise UsageError("gossip exchanges between steps: draw its schedule, or how it scales")
    workload = workload_of(case.model)
    compute_s, _ = compute_of(case, workload, cluster)
    itemsize = ITEM_NBYTES[case.wire]
    pricing = Pricing(algorithm.schedule(0, case.ranks), cluster)
    ways = {
        "after the\nbackward pass": blocking_step(pricing, float(workload.numel * itemsize), compute_s),
        f"under it, buckets\nof {case.bucket_cap_mb:g} MB": overlapped_step(
            pricing, workload.buckets(case.bucket_cap_mb * 2**20, itemsize), compute_s
        ),
    }
    figure, axes = new_figure(10, 3.8)
    axes.set_xlim(0, 1e3 * max(step.seconds for step in ways.values()) * 1.02)
    phases = pricing.phases(float(workload.numel * itemsize))
    for place, step in enumerate(ways.values()):
        _draw_lanes(axes, 2.6 * place, step, [] if place else phases)
    axes.set_yticks([2.6 * place + 0.5 for place in range(len(ways))], list(ways))
    axes.set_ylim(4.6, -0.9)
    axes.set_xlabel("ms")
    axes.set_title(
        f"{workload.name} on {case.ranks:,} ranks of {cluster.name}: {pricing.schedule.name}, {case.wire}", fontsize=11
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def _draw_lanes(axes: Axes, top: float, step: StepTime, phases: Sequence[Phase]) -> None:
    """Of the rank that ends last."""
    rank = int(step.end_s.argmax())
    computed_ms, end_ms = 1e3 * step.computed_s[rank], 1e3 * step.end_s[rank]
    forward_ms = FORWARD * computed_ms
    _draw_bar(axes, top, 0.0, forward_ms, "#9ecae1", "forward")
    _draw_bar(axes, top, forward_ms, computed_ms, "#4292c6", "backward")
    for number, act in enumerate(step.acts):
        begin_ms, packed_ms, exchanged_ms, unpacked_ms = (1e3 * times[rank] for times in act[1:])
        _draw_bar(axes, top + 0.95, begin_ms, unpacked_ms, "#74c476")
        _draw_bar(axes, top + 0.95, packed_ms, exchanged_ms, ("#fd8d3c", "#fdbe85")[number % 2])
        for place, phase in enumerate(phases):
            span = (packed_ms + 1e3 * phase.begin_s, packed_ms + 1e3 * phase.end_s)
            _draw_bar(axes, top + 0.95, *span, ("#fd8d3c", "#fdbe85")[place % 2])
    axes.plot([computed_ms, end_ms], [top + 1.72] * 2, color="#cb181d", lw=3, solid_capstyle="butt")
    said = f"{end_ms - computed_ms:.2f} ms not hidden, efficiency {step.efficiency:.1%}"
    axes.text(end_ms, top - 0.08, said, ha="right", va="bottom", fontsize=9, color="#cb181d")
    if phases:
        words = ", ".join(f"{steps} {'adding' if adds else 'copying'}" for steps, adds in _named(phases))
        room = computed_ms > axes.get_xlim()[1] / 2
        gap_ms = 0.008 * axes.get_xlim()[1]
        place, side = (computed_ms - gap_ms, "right") if room else (end_ms + gap_ms, "left")
        axes.text(place, top + 1.25, f"steps: {words}", ha=side, va="center", fontsize=9)


def _named(phases: Sequence[Phase]) -> list[tuple[int, bool]]:
    """As many as can be told one by one, or those that add and those that copy."""
    if len(phases) > MOST_NAMED:
        return [(sum(each.steps for each in phases if each.adds is adds), adds) for adds in (True, False)]
    return [(each.steps, each.adds) for each in phases]


def _draw_bar(axes: Axes, top: float, begin_ms: float, end_ms: float, colour: str, label: str = "") -> None:
    axes.broken_barh([(begin_ms, end_ms - begin_ms)], (top, 0.6), color=colour, ec="w", lw=0.4)
    if end_ms - begin_ms > LEAST_NAMED * axes.get_xlim()[1]:
        axes.text((begin_ms + end_ms) / 2, top + 0.3, label, ha="center", va="center", fontsize=9)


def draw_scaling(case: Case) -> Figure:
    """Efficiency of a training step against the number of ranks, for all algorithms."""
    cluster = Cluster.named(case.cluster or CLUSTER)
    if case.model is None:
        raise UsageError("efficiency is of a training step: give --model")
    workload = workload_of(case.model)
    compute_s, _ = compute_of(case, workload, cluster)
    most = min(cluster.ranks(), case.ranks)
    counts = [ranks for ranks in RANK_COUNTS if ranks <= most]
    if len(counts) < 2:
        raise UsageError(f"{most:g} ranks: how algorithms scale is drawn from {RANK_COUNTS[0]} ranks on; give more")
    figure, axes = new_figure(7.5, 4.6)
    for number, name in enumerate([*ALGORITHMS, GOSSIP]):
        cases = (replace(case, ranks=ranks) for ranks in counts)
        exchange_s = [Estimate(by_name(name), each, cluster).price().seconds for each in cases]
        efficiency = [100 * compute_s / (compute_s + seconds) for seconds in exchange_s]
        axes.plot(counts, efficiency, "osD^"[number] + "-", label=name, ms=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{ranks:,}" for ranks in counts])
    axes.set_ylim(0, 102)
    axes.set_xlabel("ranks")
    axes.set_ylabel("efficiency, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    title = f"{workload.name}, {case.wire}, exchanged after the step, on {cluster.name}"
    axes.set_title(f"{title} ({1e3 * compute_s:.1f} ms to compute)", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
