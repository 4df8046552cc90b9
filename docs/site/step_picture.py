# SPDX-License-Identifier: Apache-2.0
"""Draw what a GPU did in one training step, of a record of ``make gpu-link``.

``python docs/site/step_picture.py`` draws it.
A panel is a way to train, a row a stream of rank 0's GPU, a bar its kernels of one class. The last
row of commrt's panels shows the host's communication thread, which queues each bucket.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent.parent
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "optimizer": "#bdbdbd",
    "pack": "#dadaeb",
    "unpack": "#9e9ac8",
    "wait": "#e6550d",
    "reduce": "#6a51a3",
    "nccl": "#fdae6b",
    "copy": "#fdd0a2",
    "other": "#636363",
    "host": "#e7cb94",
}
LABELS = {
    "nccl": "NCCL",
    "wait": "wait for peers",
    "reduce": "add what peers hold",
    "host": "host queues a bucket",
}
JOINED = 1 / 1500
"""Bars of one class with a smaller gap between them, as a share of the step, are drawn as one."""

Bars = dict[str, list[tuple[float, float]]]
"""(begin, duration) in ms, by class."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "record", nargs="?", type=Path, help="by default the newest of bench/results"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "step_on_gpu.svg")
    options = parser.parse_args()
    path = options.record or newest()
    if path is None or not path.exists():
        print(
            f"no record {path or 'bench/results/*-profile.json'}: run make gpu-link on a machine"
            " with a GPU"
        )
        return 1
    record = json.loads(path.read_text())
    shown = {way: profile for way, profile in record["profiles"].items() if profile["kernels"]}
    if not shown:
        print(
            f"{path} holds no kernels, as it was made without a GPU: run make gpu-link on a machine"
            " with one"
        )
        return 1
    rcParams.update({"svg.hashsalt": "commrt", "svg.fonttype": "none", "font.family": "sans-serif"})
    drawn(record, shown).savefig(
        options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None
    )
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} KB, of {path.name}")
    return 0


def newest() -> Path | None:
    """Return the newest record, which is the last by its name."""
    return max((ROOT / "bench" / "results").glob("*-profile.json"), default=None)


def drawn(record: dict[str, Any], shown: dict[str, dict[str, Any]]) -> Figure:
    """Return the picture: all panels on one scale of time."""
    rows = [dict(rows_of(profile, record["classes"])) for profile in shown.values()]
    figure = Figure(
        figsize=(10, 0.9 + sum(0.7 + 0.3 * len(each) for each in rows)), layout="constrained"
    )
    heights = [1.0 + len(each) for each in rows]
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, way, each in zip(panels, shown, rows, strict=True):
        draw_panel(axes, way, each)
    panels[-1].set_xlabel("ms")
    panels[-1].set_xlim(0, max(profile["us"] for profile in shown.values()) / 1e3)
    there = {kind for each in rows for bars in each.values() for kind in bars}
    handles = [
        Patch(color=COLOURS[kind], label=LABELS.get(kind, kind))
        for kind in COLOURS
        if kind in there
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    about = record["about"]
    figure.suptitle(
        f"A step of {about['workload'].split(',')[0]} on rank 0 of two ranks, {about['gpu']}",
        fontsize=11,
    )
    return figure


def rows_of(profile: dict[str, Any], classes: Sequence[str]) -> Iterator[tuple[str, Bars]]:
    """Yield the name and the bars of each stream, then of the host."""
    for stream in sorted({number for _, number, _, _ in profile["kernels"]}):
        bars: Bars = {}
        for kind, number, begin_us, us in profile["kernels"]:
            if number == stream:
                bars.setdefault(classes[kind], []).append((begin_us / 1e3, us / 1e3))
        yield (
            name_of(stream, bars),
            {kind: joined(each, profile["us"] / 1e3) for kind, each in bars.items()},
        )
    queued = [
        (begin_us / 1e3, us / 1e3)
        for name, begin_us, us in profile["host"]
        if name.startswith("bucket")
    ]
    if queued:
        yield "host", {"host": queued}


def name_of(stream: int, bars: Bars) -> str:
    """Return what a stream is for, by what runs on it."""
    what = (
        "training"
        if stream == 0
        else "exchange"
        if {"pack", "wait", "reduce"} & {*bars}
        else "NCCL"
    )
    return f"{what}, stream {stream}"


def joined(bars: Sequence[tuple[float, float]], width: float) -> list[tuple[float, float]]:
    """Return fewer bars that look the same."""
    kept: list[tuple[float, float]] = []
    for begin, duration in sorted(bars):
        if kept and begin - sum(kept[-1]) < width * JOINED:
            first = kept[-1][0]
            kept[-1] = first, max(sum(kept[-1]), begin + duration) - first
        else:
            kept.append((begin, duration))
    return kept


def draw_panel(axes: Axes, title: str, rows: dict[str, Bars]) -> None:
    """Draw the streams of one way."""
    for place, bars in enumerate(rows.values()):
        for kind, colour in COLOURS.items():
            axes.broken_barh(bars.get(kind, []), (place - 0.4, 0.8), color=colour, lw=0)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    sys.exit(main())
