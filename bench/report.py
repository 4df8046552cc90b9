# SPDX-License-Identifier: Apache-2.0
"""``docs/benchmarks.md`` and its pictures: ``python bench/report.py`` makes them of all ``bench/results/*.jsonl``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from records import Record, read

__all__ = ["document", "sections"]

HERE = Path(__file__).parent
HEAD = """# Benchmarks

Made by `python bench/report.py` from the records in `bench/results/`; do not edit. Variants of one table were measured
in turn within one run, and a ratio is that of two times of the same turn: median (20 % .. 80 %). Below 1 is faster than
the one it is compared with. A variant whose result is wrong ends the run. No figure here is of a GPU.
"""
COMMANDS = {
    "step": "pytest bench/test_step.py --benchmark-only --records bench/results/step.jsonl",
    "netlab": "sudo python bench/netlab.py --records bench/results/netlab.jsonl",
    "own costs": "python bench/own_costs.py --records bench/results/own_costs.jsonl",
}
ABOUT = {
    "step": "The gradients of ResNet-50 (161 tensors, 25.56 M fp32) averaged over 4 processes of one machine, from the "
    "begin of the backward pass until `param.grad` holds the averages.",
    "netlab": "Hosts are network namespaces, joined by links of limited rate; several ranks on each, Gloo between all. "
    "An exchange is of 12.8 MB on each rank, from a common start until the slowest rank has its result. A step "
    "computes for 0.3 s by sleeping, a third of it forward; its time is the mean of all ranks. Gossip does less: it "
    "mixes with one partner where an all-reduce averages over all.",
    "own costs": "What the runtime takes for itself: seconds to prepare a schedule (build all steps, prove it, find "
    "one rank's program, bind it, price it); seconds to attach a model of so many tensors of 64 elements on two ranks, "
    "and of its backward pass with and without; bytes that four ranks hold besides a model and its gradients, in parts "
    "of the gradients'.",
}
HIDDEN = {"suite", "case", "variant", "peer", "rounds", "nbytes", "date", "commit", "device", "cores", "python"}


def sections(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Suite by suite, in the order of `COMMANDS`."""
    for suite in COMMANDS:
        mine = [one for one in records if one["suite"] == suite]
        if mine:
            yield suite, mine


def document(records: Sequence[Record], pictures: Sequence[str] = ()) -> str:
    """The page."""
    parts = [HEAD]
    for suite, mine in sections(records):
        parts += [f"## {suite.capitalize()}\n", ABOUT[suite] + "\n", f"`{COMMANDS[suite]}`: {_origin(mine)}.\n"]
        parts += [f"![{suite}](pictures/{_picture(suite)})\n"] * (suite in pictures)
        for case, group in groupby(mine, key=lambda one: one["case"]):
            rows = list(group)
            parts.append(f"**{case}**\n\n{_compared(rows) if 'ratio' in rows[0] else _figures(rows)}\n")
    return "\n".join(parts)


def _origin(records: Sequence[Record]) -> str:
    places = {(one["device"], one["cores"], one["date"], one["commit"], one.get("torch")) for one in records}
    return "; ".join(f"{device}, {cores} cores, {date}, commit {commit}, torch {torch}"
                     for device, cores, date, commit, torch in sorted(places))  # fmt: skip


def _compared(rows: Sequence[Record]) -> str:
    lines = ["| | ms | ratio | to |", "|---|---|---|---|"]
    for one in rows:
        ratio = f"{one['ratio']:.2f} ({one['ratio_quantile20']:.2f} .. {one['ratio_quantile80']:.2f})"
        times = f"{1e3 * one['median_s']:.1f} ({1e3 * one['quantile20_s']:.1f} .. {1e3 * one['quantile80_s']:.1f})"
        itself = one["variant"] == one["peer"]
        lines.append(f"| {one['variant']} | {times} | {'1' if itself else ratio} | {'' if itself else one['peer']} |")
    return "\n".join(lines)


def _figures(rows: Sequence[Record]) -> str:
    keys = list(dict.fromkeys(key for one in rows for key, value in one.items() if _is_figure(key, value)))
    lines = [f"| | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for one in rows:
        cells = (f"{one[key]:.3g}" if key in one else "" for key in keys)
        lines.append(f"| {one['variant']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _is_figure(key: str, value: Any) -> bool:
    return key not in HIDDEN and isinstance(value, float)


def _picture(suite: str) -> str:
    return f"bench_{suite.replace(' ', '_')}.svg"


def draw(suite: str, records: Sequence[Record], folder: Path) -> None:
    """Ratios of all variants, case by case."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # heavy

    cases = [(case, list(group)) for case, group in groupby(records, key=lambda one: one["case"])]
    heights = [len(rows) for _, rows in cases]
    figure = Figure(figsize=(9, 0.9 * len(cases) + 0.27 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (case, rows) in zip(grid, cases, strict=True):
        for place, one in enumerate(rows):
            spread = [[one["ratio"] - one["ratio_quantile20"]], [one["ratio_quantile80"] - one["ratio"]]]
            colour = "#bdbdbd" if one["variant"] == one["peer"] else "#4292c6"
            axes.barh(place, one["ratio"], color=colour, xerr=spread, error_kw={"lw": 1}, height=0.72)
            axes.text(0.005, place, f" {one['ratio']:.2f}", va="center", fontsize=8, color="w", weight="bold")
        axes.set_yticks(range(len(rows)), [one["variant"] for one in rows], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.3", lw=0.8)
        axes.set_title(f"{case}: time over that of {rows[0]['peer']}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / _picture(suite))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, default=sorted((HERE / "results").glob("*.jsonl")))
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    options = parser.parse_args()
    records, drawn = read(options.records), []
    for suite, mine in sections(records):
        if compared := [one for one in mine if "ratio" in one]:
            draw(suite, compared, options.docs / "pictures")
            drawn.append(suite)
    (options.docs / "benchmarks.md").write_text(document(records, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
