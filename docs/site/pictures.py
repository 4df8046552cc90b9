# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the pages anew: ``make pictures``.

Those of measurements are drawn by what measures. This fits all of them to light and dark pages.
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

from commrt.algorithms import halving_doubling, ring, torus, tree
from commrt.algorithms.gossip import Gossip
from commrt.schedule import Schedule
from commrt.tools.pictures.drawing import draw_schedule
from commrt.tools.pictures.figures import new_figure

PICTURES = Path(__file__).parent.parent / "pictures"
STYLE = """<style type="text/css">@media (prefers-color-scheme: dark) {
text, g[id^="text_"] { fill: #d5d8df }
[style*="stroke: #000000"], [style*="stroke: #4c4c4c"] { stroke: #d5d8df !important }
[style*="stroke: #d9d9d9"], [style*="stroke: #b0b0b0"] { stroke: #555a66 !important }
[style*="fill: #f2f2f2"] { fill: #8080801f !important; stroke: none !important }
}</style>"""
"""Dark pages: light text and axes, and no white area."""
sys.path.insert(0, str(PICTURES.parents[1] / "studies/tensor_parallelism"))
from grid_schedules import Grid, backward  # noqa: E402


def period(algorithm: Gossip, ranks: int, steps: int) -> Schedule:
    """So many steps of gossip as one schedule."""
    parts = [algorithm.schedule(step, ranks) for step in range(steps)]
    return reduce(lambda one, other: one.then(other), parts).named(
        f"gossip, {steps} training steps"
    )


def of_the_tutorial(ranks: int) -> Schedule:
    """The schedule that docs/own_schedule.md writes, as its first blocks write it."""
    names: dict[str, Any] = {}
    page = (PICTURES.parent / "own_schedule.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:3]:
        with redirect_stdout(None):
            exec(block, names)  # noqa: S102  # it is ours
    schedule: Schedule = names["swing"](ranks)
    return schedule


def first_of(arrivals_s: np.ndarray, backups: int) -> Figure:
    """When each rank has its gradient, and who makes the step."""
    needed = len(arrivals_s) - backups
    order = np.argsort(arrivals_s, kind="stable")
    counted = set(order[:needed].tolist())
    figure, axes = new_figure(7.0, 2.9)
    for rank, seconds in enumerate(arrivals_s.tolist()):
        axes.barh(rank, seconds, 0.62, color="#4292c6" if rank in counted else "#fdd0a2")
    end = float(arrivals_s[order[needed - 1]])
    axes.axvline(end, color="#e6550d", lw=1.5)
    axes.text(
        end + 0.03,
        -0.75,
        f"the step is made by the first {needed}",
        color="#e6550d",
        fontsize=9,
        va="center",
    )
    axes.set_yticks(
        range(len(arrivals_s)), [f"rank {rank}" for rank in range(len(arrivals_s))], fontsize=9
    )
    axes.set_ylim(len(arrivals_s) - 0.4, -1.3)
    axes.set_xlabel("s until the gradient is ready")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def for_both_schemes(picture: str) -> str:
    """Return an SVG with a transparent background, whose text and axes follow the page's scheme."""
    transparent = re.sub(r'(<path [^>]*style=")fill: #ffffff', r"\1fill: none", picture)
    if "prefers-color-scheme" in picture:
        return transparent
    return transparent.replace("<defs>", f"{STYLE}\n <defs>", 1)


def main() -> None:
    """Write all of them."""
    rcParams.update({"svg.hashsalt": "commrt", "svg.fonttype": "none", "font.family": "sans-serif"})
    drawn = {
        "ring": draw_schedule(ring.all_reduce(4)),
        "halving_doubling": draw_schedule(halving_doubling.all_reduce(8)),
        "torus": draw_schedule(torus.all_reduce(4, 3)),
        "gossip": draw_schedule(period(Gossip(), 8, 6)),
        "swing": draw_schedule(of_the_tutorial(8)),
        "broadcast": draw_schedule(tree.broadcast(8)),
        "summa": draw_schedule(backward(Grid(2, 2))),
        "backup_workers": first_of(
            np.array([1.02, 0.97, 1.05, 2.61, 0.99, 1.04, 1.01, 1.08]), backups=1
        ),
    }
    for name, figure in drawn.items():
        file = PICTURES / f"{name}.svg"
        figure.savefig(file, metadata={"Date": None})
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} KB")
    for file in PICTURES.glob("*.svg"):
        file.write_text(for_both_schemes(file.read_text()))


if __name__ == "__main__":
    main()
