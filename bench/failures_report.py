# SPDX-License-Identifier: Apache-2.0
"""Tables, records and the picture of ``python bench/failures.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from records import Record, provenance

__all__ = ["NAMES", "Row", "draw_picture", "records_of", "tables"]

Row = dict[str, Any]
"""The figures of one run: `Result.as_dict()`."""
NAMES = {
    "ddp": "DDP over Gloo, checkpoints",
    "ddp-commrt": "DDP over commrt, checkpoints",
    "backup1": "`BackupWorkers(1)`, replacement",
    "backup2": "`BackupWorkers(2)`, replacement",
    "gossip": "`Gossip()`, without the dead",
    "local": "`LocalSGD(4, delay=1)`, without the dead",
    "torchft": "torchft over Gloo, replacement",
}
FIGURES = ("updates_lost", "samples_twice", "samples_never", "loss", "restarted", "replaced", "hit", "failures")
PEER = "ddp"


def records_of(rows: Sequence[Row], **about: Any) -> Iterator[Record]:
    """Yield a record for each contender and rate: medians over the seeds, with the lowest and the highest ratio."""
    for every in sorted({row["every"] for row in rows}, key=lambda rate: -(rate or 1e9)):
        for name in dict.fromkeys(row["contender"] for row in rows):
            mine = [row for row in rows if (row["contender"], row["every"]) == (name, every)]
            if mine:
                case = f"a failure every {every} steps" if every else "without failures"
                yield {
                    "suite": "failures",
                    "case": case,
                    "variant": name,
                    "every": every,
                    "seeds": len(mine),
                    "median_s": median(row["seconds"] for row in mine),
                    **_ratios(mine, rows, name, "ratio"),
                    **_ratios(mine, rows, PEER, "ratio_to_ddp"),
                    **{key: median(row[key] for row in mine) for key in FIGURES},
                    "loss_low": min(row["loss"] for row in mine),
                    "loss_high": max(row["loss"] for row in mine),
                    "errors": sum(len(row["errors"]) for row in mine),
                    "complaints": sum(len(row["complaints"]) for row in mine),
                    "joins_s": _middle([each for row in mine for each in row["joins_s"]]),
                    "gaps_s": _gaps(mine),
                    **about,
                    **provenance(),
                }


def _ratios(mine: Sequence[Row], rows: Sequence[Row], peer: str, key: str) -> dict[str, float]:
    """Return the times over the median of those of `peer` without failures."""
    base = _middle([row["seconds"] for row in rows if row["contender"] == peer and row["every"] is None])
    if base is None:
        return {}
    ratios = [row["seconds"] / base for row in mine]
    return {key: median(ratios), f"{key}_low": min(ratios), f"{key}_high": max(ratios)}


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _gaps(mine: Sequence[Row]) -> dict[str, float]:
    kinds = sorted({kind for row in mine for kind in row["gaps_s"]})
    return {kind: median(gap for row in mine for gap in row["gaps_s"].get(kind, [])) for kind in kinds}


def tables(records: Sequence[Record]) -> str:
    """Return the table of times, and that of what the most frequent failures cost."""
    rates = list(dict.fromkeys(one["every"] for one in records))
    found = {(one["variant"], one["every"]): one for one in records}
    names = list(dict.fromkeys(one["variant"] for one in records))
    head = ["s without failures", *(f"every {rate} steps" for rate in rates if rate)]
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name in names:
        cells = [_seconds(found.get((name, None))), *(_ratio(found.get((name, rate))) for rate in rates if rate)]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    worst = min((rate for rate in rates if rate), default=None)
    calm = {one["variant"]: one for one in records if one["every"] is None}
    return "\n".join([*lines, "", *_costs([one for one in records if one["every"] == worst], calm)])


def _seconds(one: Record | None) -> str:
    return "" if one is None else f"{one['median_s']:.1f}"


def _ratio(one: Record | None) -> str:
    if one is None or "ratio" not in one:
        return ""
    return f"{one['ratio']:.2f} ({one['ratio_low']:.2f} .. {one['ratio_high']:.2f})"


def _loss(one: Record | None) -> str:
    return "" if one is None else f"{one['loss']:.2f} ({one['loss_low']:.2f} .. {one['loss_high']:.2f})"


def _costs(records: Sequence[Record], calm: dict[str, Record]) -> Iterator[str]:
    """Yield the lines of a table of what is lost."""
    if not records:
        return
    head = [records[0]["case"], "of DDP's time", "updates lost", "samples twice", "never", "loss", "without failures"]
    head += ["restarts", "replaced", "hit"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for one in records:
        cells = [NAMES[one["variant"]], f"{one['ratio_to_ddp']:.2f}" if "ratio_to_ddp" in one else ""]
        cells += [f"{one[key]:g}" for key in ("updates_lost", "samples_twice", "samples_never")]
        cells += [
            _loss(one),
            _loss(calm.get(one["variant"])),
            *(f"{one[key]:g}" for key in ("restarted", "replaced", "hit")),
        ]
        yield f"| {' | '.join(cells)} |"


def draw_picture(records: Sequence[Record], path: Path) -> None:
    """Draw the ratios of all contenders, by rate."""
    from matplotlib import rcParams  # noqa: PLC0415  # heavy
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.hashsalt"] = "failures"  # the same records make the same bytes
    rates = [rate for rate in dict.fromkeys(one["every"] for one in records) if rate]
    names = list(dict.fromkeys(one["variant"] for one in records))
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    for number, rate in enumerate(rates):
        mine = [one for one in records if one["every"] == rate and "ratio" in one]
        places = [names.index(one["variant"]) + 0.26 * (number - (len(rates) - 1) / 2) for one in mine]
        spread = [
            [one["ratio"] - one["ratio_low"] for one in mine],
            [one["ratio_high"] - one["ratio"] for one in mine],
        ]
        colour = ("#c6dbef", "#6baed6", "#08519c")[number % 3]
        widths = [one["ratio"] for one in mine]
        label = f"a failure every {rate} steps"
        axes.barh(places, widths, xerr=spread, height=0.24, color=colour, label=label, error_kw={"lw": 1})
    axes.set_yticks(range(len(names)), [NAMES[name].replace("`", "") for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.3", lw=0.8)
    axes.set_title("time to the last step over that without failures", fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
