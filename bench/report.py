# SPDX-License-Identifier: Apache-2.0
"""Make ``docs/benchmarks.md`` and its pictures from records: ``python bench/report.py``.

It reads ``bench/results/*.jsonl``, or the files that you name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from records import Record, read

__all__ = ["document", "sections"]

HERE = Path(__file__).parent
HEAD = """# Benchmarks

How fast commrt is beside DDP, Gloo and plain torch. `python bench/report.py` makes this page: do not edit it.

The variants of a table run interleaved in one run. Cells show the median and, in brackets, the 20th and 80th
percentiles. A ratio divides two times of the same round; **above 1** (bold) is slower than the peer. See
[findings](../bench/FINDINGS.md), and [GPUs](evidence.md#on-a-gpu).
"""
COMMANDS = {
    "step": "pytest bench/test_step.py --benchmark-only",
    "whole steps": "python bench/whole_steps.py",
    "beside MPI": "python bench/beside_mpi.py",
    "collectives": "pytest bench/test_collectives.py --benchmark-only",
    "netlab": "sudo python bench/netlab.py",
    "kernels": "pytest bench/test_kernels.py --benchmark-only",
    "overlap": "pytest bench/test_overlap.py --benchmark-only",
    "schedules": "pytest bench/test_schedules.py --benchmark-only",
    "own costs": "python bench/own_costs.py",
}
ABOUT = {
    "step": "4 processes on one machine average the gradients of ResNet-50 (161 tensors, 25.56 M fp32), from the start "
    "of the backward pass until `param.grad` holds the averages. Bus: the bytes that each rank must send at least, per "
    "second.",
    "whole steps": "A GPT of 0.2 or 11 million parameters on CPUs: forward and backward pass, clipping, AdamW; the "
    "mean of a few steps in a row on the slowest rank.",
    "beside MPI": "All-reduces of fp32 in one job of MPICH; a time is of one of up to 50 calls in a row, on the "
    "slowest rank.",
    "collectives": "torch.distributed's own calls on 4 processes of one machine. A size is that of the call's largest "
    "tensor; a time is of one of up to 20 calls in a row.",
    "netlab": "Hosts are network namespaces with several ranks each, joined by links of limited rate. Gossip mixes "
    "with one partner only.\n"
    "\n"
    "- An exchange moves 12.8 MB of each rank, until the slowest rank has its result.\n"
    "- A step computes for 0.3 s by sleeping, a third of it in the forward pass; the mean of all ranks.\n"
    "- With one link at a quarter of the rate, the bytes are a quarter, too.\n"
    "- Hierarchical gossip with bf16 is an exchange only: `attach` refuses it for fp32 weights.",
    "kernels": "Without a GPU, definitions in plain torch replace the kernels; this compares them with functions of "
    "torch, some of which do less, on one thread. `of a copy`: bytes that must be moved per second, divided by those "
    "of the fastest plain copy in the same run. The records have more models.",
    "overlap": "A backward pass alone, and with its gradients packed beside it. Without a GPU this is only a toy.",
    "schedules": "Milliseconds to build all steps of a schedule, to prove it for all ranks, to find one rank's "
    "program, to bind it, and to price it on a cluster.",
    "own costs": "Seconds to attach a model with that many tensors of 64 elements on two ranks, and of its backward "
    "pass with commrt and alone; bytes that four ranks hold besides the model and its gradients, divided by the bytes "
    "of the gradients (mean and largest).",
}
SHOWN = re.compile(r"ResNet-50|25 MiB|all gradients moved|10,000 tensors")
"""Cases of kernels that the page shows."""
OURS = "commrt"


def sections(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yield each suite and its records, in the order of `COMMANDS`."""
    for suite in COMMANDS:
        mine = [one for one in records if one["suite"] == suite]
        if mine:
            yield suite, mine


def document(records: Sequence[Record], pictures: Sequence[str] = ()) -> str:
    """Return the page of benchmarks. `pictures` are the suites that have one."""
    parts = [HEAD]
    for suite, mine in sections(records):
        parts += [
            f"## {suite[0].upper()}{suite[1:]}\n",
            ABOUT[suite] + "\n",
            f"`{COMMANDS[suite]}`: {_origin(mine)}.\n",
        ]
        parts += [f"![{suite}](pictures/{_picture(suite)})\n"] * (suite in pictures)
        parts += list(TABLES.get(suite, _by_case)(mine))
    return "\n".join(parts)


def _origin(records: Sequence[Record]) -> str:
    return "; ".join(
        dict.fromkeys(
            f"{one['device']}, {one['cores']} cores, {one['date']}, commit {one['commit']}, torch {one['torch']}"
            for one in records
        )
    )


def _by_case(records: Sequence[Record]) -> Iterator[str]:
    for case, group in groupby(records, key=lambda one: one["case"]):
        rows = list(group)
        yield f"**{case}**\n\n{_compared(rows) if 'ratio' in rows[0] else _rated(rows)}\n"


def _compared(rows: Sequence[Record]) -> str:
    unit, per_s = ("ms", 1e3) if rows[0]["median_s"] > 1e-3 else ("us", 1e6)
    rated = any("bus_gb_per_s" in one for one in rows)
    peers = {one["peer"] for one in rows}
    of_all = peers.pop() if len(peers) == 1 else None
    head = [unit, f"ratio to {of_all}" if of_all else "ratio", *["to"] * (of_all is None), *["bus, GB/s"] * rated]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for one in rows:
        low, middle, high = (one[key] * per_s for key in ("quantile20_s", "median_s", "quantile80_s"))
        cells = [one["variant"], f"{middle:.1f} ({low:.1f} .. {high:.1f})", _ratio(one)]
        cells += ["" if one["variant"] == one["peer"] else one["peer"]] * (of_all is None)
        cells += [f"{one['bus_gb_per_s']:.3g}" if "bus_gb_per_s" in one else ""] * rated
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _collectives(records: Sequence[Record]) -> Iterator[str]:
    """Yield a table with one line per call and size."""
    lines = ["| | commrt, us | Gloo, us | ratio |", "|---|---|---|---|"]
    seconds = {one["variant"]: one["median_s"] for one in records}
    for one in records:
        if one["variant"] != one["peer"]:
            name = one["variant"].removesuffix(f", {OURS}")
            cells = [f"{1e6 * each:.0f}" for each in (one["median_s"], seconds[one["peer"]])]
            lines.append(f"| {' | '.join([name, *cells, _ratio(one)])} |")
    yield "\n".join(lines) + "\n"


def _beside_mpi(records: Sequence[Record]) -> Iterator[str]:
    """Yield a table with one line per size and number of ranks: MPI's time, and the others' ratios to it."""
    ways = [*dict.fromkeys(one["variant"] for one in records)]
    lines = [f"| | {ways[0]}, us | {' | '.join(ways[1:])} |", "|---" * (len(ways) + 1) + "|"]
    for case, group in groupby(records, key=lambda one: one["case"]):
        first, *others = group
        lines.append(f"| {case} | {1e6 * first['median_s']:.0f} | {' | '.join(map(_ratio, others))} |")
    yield "\n".join(lines) + "\n"


def _ratio(one: Record) -> str:
    if one["variant"] == one["peer"]:
        return "1"
    middle = f"{one['ratio']:.2f}"
    shown = f"**{middle}**" if float(middle) > 1.0 else middle
    return f"{shown} ({one['ratio_quantile20']:.2f} .. {one['ratio_quantile80']:.2f})"


def _rated(rows: Sequence[Record]) -> str:
    lines = ["| | us |", "|---|---|"]
    for one in rows:
        low, middle, high = (1e6 * one[key] for key in ("quantile20_s", "median_s", "quantile80_s"))
        lines.append(f"| {one['variant']} | {middle:.2f} ({low:.2f} .. {high:.2f}) |")
    return "\n".join(lines)


def _own_costs(records: Sequence[Record]) -> Iterator[str]:
    """Yield one table for all records with the same figures."""
    for keys, group in groupby(records, key=_figures_of):
        head = [f"| | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
        rows = ([f"{one['case']}, {one['variant']}", *(f"{one[key]:.3g}" for key in keys)] for one in group)
        yield "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def _figures_of(one: Record) -> tuple[str, ...]:
    return tuple(key for key, value in one.items() if isinstance(value, float))


def _kernels(records: Sequence[Record]) -> Iterator[str]:
    """Yield a table with one line per task that is shown: commrt, and the fastest of the others."""
    lines = ["| | ms | GB/s | of a copy | ratio | to the fastest other | its ms |", "|---|---|---|---|---|---|---|"]
    for case, group in groupby(filter(_is_shown, records), key=lambda one: one["case"]):
        by_name = {one["variant"]: one for one in group}
        for who in (who for who in by_name if who.startswith(OURS)):
            one, other = by_name[who], by_name[by_name[who]["peer"]]
            task = case.removesuffix(": called") + who.removeprefix(OURS)
            cells = [task, f"{1e3 * one['median_s']:.2f}", f"{one['gb_per_s']:.1f}", f"{one['of_copy']:.2f}"]
            lines.append(f"| {' | '.join([*cells, _ratio(one), one['peer']])} | {1e3 * other['median_s']:.2f} |")
    yield "\n".join(lines) + "\n"


def _is_shown(one: Record) -> bool:
    return SHOWN.search(one["case"]) is not None


def _schedules(records: Sequence[Record]) -> Iterator[str]:
    """Yield a table with one line per schedule and one column per task."""
    tasks = list(dict.fromkeys(one["case"] for one in records))
    found = {(one["variant"], one["case"]): 1e3 * one["median_s"] for one in records}
    lines = [f"| | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for variant in dict.fromkeys(variant for variant, _ in found):
        cells = (f"{found[variant, task]:.3g}" if (variant, task) in found else "" for task in tasks)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    yield "\n".join(lines) + "\n"


TABLES = {
    "beside MPI": _beside_mpi,
    "collectives": _collectives,
    "kernels": _kernels,
    "schedules": _schedules,
    "own costs": _own_costs,
}


def _picture(suite: str) -> str:
    return f"bench_{suite.replace(' ', '_')}.svg"


PICTURED = {"step", "netlab"}


def draw(suite: str, records: Sequence[Record], folder: Path) -> None:
    """Draw the ratios of all variants, case by case, into `folder`."""
    from matplotlib import rcParams  # noqa: PLC0415  # heavy
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.hashsalt"] = suite  # the same records make the same bytes

    cases = [(case, list(group)) for case, group in groupby(records, key=lambda one: one["case"])]
    heights = [len(rows) for _, rows in cases]
    figure = Figure(figsize=(9, 0.9 * len(cases) + 0.27 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (case, rows) in zip(grid, cases, strict=True):
        for place, one in enumerate(rows):
            spread = [[one["ratio"] - one["ratio_quantile20"]], [one["ratio_quantile80"] - one["ratio"]]]
            colour = "#bdbdbd" if one["variant"] == one["peer"] else "#4292c6"
            axes.barh(place, one["ratio"], color=colour, xerr=spread, error_kw={"lw": 1}, height=0.72)
            axes.text(0.005, place, f" {one['ratio']:.2f}", va="center", fontsize=9, color="w", weight="bold")
        axes.set_yticks(range(len(rows)), [one["variant"] for one in rows], fontsize=9)
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.3", lw=0.8)
        axes.set_title(f"{case}: time over that of {rows[0]['peer']}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / _picture(suite), metadata={"Date": None})


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="files of records (default: bench/results/*.jsonl)")
    parser.add_argument("--out", type=Path, help="write the page to this folder (default: docs/)")
    options = parser.parse_args()
    records, drawn = read(options.records or sorted((HERE / "results").glob("*.jsonl"))), []
    folder = options.out or HERE.parent / "docs"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for suite, mine in sections(records):
        if suite in PICTURED:
            draw(suite, mine, folder / "pictures")
            drawn.append(suite)
    (folder / "benchmarks.md").write_text(document(records, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
