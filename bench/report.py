# SPDX-License-Identifier: Apache-2.0
"""``docs/benchmarks.md``, its pictures and the README's table: ``python bench/report.py`` makes them of all records.

Records are the lines of ``bench/results/*.jsonl``, or of the files that are named.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from records import Record, read

__all__ = ["document", "sections", "summary"]

HERE = Path(__file__).parent
BEGIN, END = "<!-- made by bench/report.py -->\n", "<!-- until here -->\n"
HEAD = """# Benchmarks

Made by `python bench/report.py` from records; do not edit. Variants of one table were measured in turn within one run,
and a ratio is that of two times of the same turn: median (20 % .. 80 %), where a fifth of the turns gave less than the
first figure in brackets, and a fifth more than the second. Below 1 is faster than the one it is compared with,
**above 1**, in bold, slower. A variant whose result is wrong ends the run. No figure here is of a GPU. What was learnt
from them, and what failed, is in [FINDINGS.md](../bench/FINDINGS.md).
"""
COMMANDS = {
    "step": "pytest bench/test_step.py --benchmark-only",
    "netlab": "sudo python bench/netlab.py",
    "kernels": "pytest bench/test_kernels.py --benchmark-only",
    "executor": "pytest bench/test_executor.py --benchmark-only",
    "overlap": "pytest bench/test_overlap.py --benchmark-only",
    "schedules": "pytest bench/test_schedules.py --benchmark-only",
    "own costs": "python bench/own_costs.py",
}
ABOUT = {
    "step": "The gradients of ResNet-50 (161 tensors, 25.56 M fp32) averaged over 4 processes of one machine, from the "
    "begin of the backward pass until `param.grad` holds the averages. Bus: what each rank must send at least, per "
    "second.",
    "netlab": "Hosts are network namespaces, joined by links of limited rate; several ranks on each. An exchange is of "
    "12.8 MB on each rank, from a common start until the slowest rank has its result. A step computes for 0.3 s by "
    "sleeping, a third of it forward; its time is the mean of all ranks. Where one link has a quarter of the rate, so "
    "have the bytes. Gossip does less: it mixes with one partner where an all-reduce averages over all. An exchange is "
    "bare, of a buffer and no model: of hierarchical gossip with bf16 that is all there is, as `attach` refuses a "
    "16-bit `wire=` for fp32 weights with `Gossip(within=...)`.",
    "kernels": "Without a GPU: the definitions in plain torch, which take the kernels' place there, beside what torch "
    "ships, one thread. They scale, cast, and write flags and a stamp; others that do less are compared with all the "
    "same, and named so. Of a copy: bytes that must be moved per second, of those that the fastest plain copy moves in "
    "the same run.",
    "executor": "What exchanging costs the host, per call: three processes over Gloo's sockets, and `NcclTransport` "
    "over calls that do nothing, which is all that is not NCCL. And per transfer where transfers take no time.",
    "overlap": "A backward pass alone, and with its gradients packed beside it. Without a GPU a toy.",
    "schedules": "Milliseconds to build all steps of a schedule, to find one rank's program, to bind it, to price it "
    "on a cluster, and to prove it for all ranks.",
    "own costs": "Seconds to attach a model of so many tensors of 64 elements on two ranks, and of its backward pass "
    "with and without; bytes that four ranks hold besides a model and its gradients, in parts of the gradients'.",
}
OURS = "commrt"


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
        parts += list(TABLES.get(suite, _by_case)(mine))
    return "\n".join(parts)


SUMMARY = {
    ("step", "4 processes"): "ResNet-50's gradients, 102 MB, averaged over 4 processes of one machine; ratio to DDP",
    ("netlab", "exchange"): "12.8 MB over 4 hosts of 2 ranks, links of 0.025 GB/s; ratio to Gloo's all-reduce",
}


def summary(records: Sequence[Record]) -> str:
    """One table with both wires side by side, and where it comes from, for the README."""
    shown = [one for one in records if (one["suite"], one["case"]) in SUMMARY and one["variant"] != "backward alone"]
    lines = ["| | ms | bus, GB/s | ratio | ratio with bf16 |", "|---|---|---|---|---|"]
    for place, group in groupby(shown, key=lambda one: (one["suite"], one["case"])):
        rows: dict[str, dict[str, Record]] = {}
        for one in group:
            name, wire = _wire(one["variant"])
            rows.setdefault(name, {})[wire] = one
        lines.append(f"| **{SUMMARY[place]}** | | | | |")
        lines += [f"| {name} | {' | '.join(_summed(found))} |" for name, found in rows.items()]
    commands = " and ".join(f"`{COMMANDS[suite]}`" for suite in dict.fromkeys(one["suite"] for one in shown))
    return "\n".join([*lines, "", f"{commands}: {_origin(shown)}."]) + "\n"


def _summed(found: dict[str, Record]) -> Iterator[str]:
    """The cells of a row."""
    plain, narrow = found["fp32"], found.get("bf16")
    low, middle, high = (1e3 * plain[key] for key in ("quantile20_s", "median_s", "quantile80_s"))
    yield f"{middle:.0f} ({low:.0f} .. {high:.0f})"
    yield f"{plain['bus_gb_per_s']:.2g}" if "bus_gb_per_s" in plain else ""
    yield _ratio(plain)
    yield _ratio(narrow) if narrow else ""


def _wire(variant: str) -> tuple[str, str]:
    """What is done, and the dtype that travels."""
    words = variant.replace(",", "").split()
    wire = "bf16" if "bf16" in words else "fp32"
    return " ".join(word for word in words if word not in {"fp32", "bf16", "hook"}), wire


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
    head = [unit, "ratio", "to", *["bus, GB/s"] * rated]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for one in rows:
        low, middle, high = (one[key] * per_s for key in ("quantile20_s", "median_s", "quantile80_s"))
        cells = [one["variant"], f"{middle:.1f} ({low:.1f} .. {high:.1f})", _ratio(one)]
        cells += ["" if one["variant"] == one["peer"] else one["peer"]]
        cells += [f"{one['bus_gb_per_s']:.3g}" if "bus_gb_per_s" in one else ""] * rated
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    """One table for all records with the same figures."""
    for keys, group in groupby(records, key=_figures_of):
        head = [f"| | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
        rows = ([f"{one['case']}, {one['variant']}", *(f"{one[key]:.3g}" for key in keys)] for one in group)
        yield "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def _figures_of(one: Record) -> tuple[str, ...]:
    return tuple(key for key, value in one.items() if isinstance(value, float))


def _kernels(records: Sequence[Record]) -> Iterator[str]:
    """One line per task: this project's, and the fastest of the others."""
    lines = ["| | ms | GB/s | of a copy | ratio | to the fastest other | its ms |", "|---|---|---|---|---|---|---|"]
    for case, group in groupby(records, key=lambda one: one["case"]):
        by_name = {one["variant"]: one for one in group}
        for who in (who for who in by_name if who.startswith(OURS)):
            one, other = by_name[who], by_name[by_name[who]["peer"]]
            task = case.removesuffix(": called") + who.removeprefix(OURS)
            cells = [task, f"{1e3 * one['median_s']:.2f}", f"{one['gb_per_s']:.1f}", f"{one['of_copy']:.2f}"]
            lines.append(f"| {' | '.join([*cells, _ratio(one), one['peer']])} | {1e3 * other['median_s']:.2f} |")
    yield "\n".join(lines) + "\n"


def _schedules(records: Sequence[Record]) -> Iterator[str]:
    """One line per schedule, one column per task."""
    tasks = list(dict.fromkeys(one["case"] for one in records))
    found = {(one["variant"], one["case"]): 1e3 * one["median_s"] for one in records}
    lines = [f"| | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for variant in dict.fromkeys(variant for variant, _ in found):
        cells = (f"{found[variant, task]:.3g}" if (variant, task) in found else "" for task in tasks)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    yield "\n".join(lines) + "\n"


TABLES = {"kernels": _kernels, "schedules": _schedules, "own costs": _own_costs}


def _picture(suite: str) -> str:
    return f"bench_{suite.replace(' ', '_')}.svg"


PICTURED = {"step", "netlab"}


def draw(suite: str, records: Sequence[Record], folder: Path) -> None:
    """Ratios of all variants, case by case."""
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
            axes.text(0.005, place, f" {one['ratio']:.2f}", va="center", fontsize=8, color="w", weight="bold")
        axes.set_yticks(range(len(rows)), [one["variant"] for one in rows], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.3", lw=0.8)
        axes.set_title(f"{case}: time over that of {rows[0]['peer']}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / _picture(suite), metadata={"Date": None})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="files of records")
    parser.add_argument("--out", type=Path, help="a folder for the page; docs/, and the README's table, otherwise")
    options = parser.parse_args()
    records, drawn = read(options.records or sorted((HERE / "results").glob("*.jsonl"))), []
    folder = options.out or HERE.parent / "docs"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for suite, mine in sections(records):
        if suite in PICTURED:
            draw(suite, mine, folder / "pictures")
            drawn.append(suite)
    (folder / "benchmarks.md").write_text(document(records, drawn), encoding="utf-8")
    if options.out is None:
        _put(HERE.parent / "README.md", summary(records))


def _put(page: Path, table: str) -> None:
    """Between the marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
