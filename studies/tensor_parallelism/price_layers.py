# SPDX-License-Identifier: Apache-2.0
"""What a transformer layer exchanges whose matrices are split: ``python studies/tensor_parallelism/price_layers.py``.

Each layout is proven, then priced. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import grid_schedules  # of this folder
import typer
from layer_costs import LayerCost, LayerSize, layer_costs  # of this folder
from rich.console import Console
from rich.table import Table

from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import CLUSTER, Wire
from commrt.tools.commands.output import json_of
from commrt.tools.planning.wires import ITEMS, wire_nbytes

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

MOST_RANKS = 256
MIN_WIDTH = 140
"""Of the table: names that are cut off cannot be told apart."""
SIZES = "6144x3072", "16384x4096", "98304x8192"
"""Priced if no --size is given: few, more and many tokens for each unit of width."""
ONLY_PRICED = (
    "commrt splits no model for you: summa.py, of this folder, shows how a program does it on commrt's backend"
)


@app.command()
def price_layers(
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 64,
    cluster: opt.ClusterName = CLUSTER,
    wire: opt.WireDtype = Wire.fp32,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENSxWIDTH",
            show_default="three sizes",
            help="Tokens of a step and width of the layer; repeatable.",
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="TFLOP/s that a rank reaches, to add the time of computing to that of exchanges."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Prove and price the schedules of each layout and size, on each grid that divides the layer."""
    _require_possible(wire.value, ranks, tflops)
    described = Cluster.named(cluster)
    described.require_capacity(ranks)
    sizes, itemsize = [_size(text) for text in size or SIZES], int(wire_nbytes(1, ITEMS[wire.value]))
    costs = {each: layer_costs(described, ranks, each, itemsize) for each in sizes}
    for cost in {(cost.layout, cost.by): cost for found in costs.values() for cost in found}.values():
        _prove(cost, ranks)
    rows = [_record(each, cost, ranks, tflops) for each, found in costs.items() for cost in found]
    if as_json:
        print(json_of({"cluster": described.name, "ranks": ranks, "wire": wire.value, "layouts": rows}))
        return
    table = _table(f"a transformer layer on {ranks} ranks of {described.name}, {wire.value}", rows)
    Console(width=max(Console().width, MIN_WIDTH)).print(table)
    print(ONLY_PRICED)
    print(f"{described.name}: {' '.join(described.about.split())}")


def _require_possible(wire: str, ranks: int, tflops: float | None) -> None:
    if wire in QUANTIZERS:
        raise UsageError(f"--wire {wire}: activations travel as numbers; give fp32, bf16 or fp16")
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: a layer is split over 2 to {MOST_RANKS} ranks")
    if tflops is not None and not 0 < tflops < 1e9:
        raise UsageError(f"--tflops {tflops:g}: give what a rank computes per second, such as 300")


def _size(text: str) -> LayerSize:
    numbers = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,5})", text)
    if numbers is None:
        raise UsageError(f"--size {text!r} is no size of a layer: write tokens x width, such as 6144x3072")
    return LayerSize(int(numbers[1]), int(numbers[2]))


def _prove(cost: LayerCost, ranks: int) -> None:
    """Raise `ScheduleError` if a schedule is wrong. Blocks of other sizes only have more chunks that move alike."""
    if cost.all_reduce is not None:
        schedule = cost.all_reduce.schedule(0, ranks)
        prove(schedule, all_reduce(ranks, schedule.chunks))
    if cost.grid is not None:
        there, back = (
            of_pass(cost.grid, slices=cost.slices) for of_pass in (grid_schedules.forward, grid_schedules.backward)
        )
        prove(there, grid_schedules.forward_goal(cost.grid, there.chunks))
        prove(back, grid_schedules.backward_goal(cost.grid, back.chunks))


def _record(size: LayerSize, cost: LayerCost, ranks: int, tflops: float | None) -> dict[str, Any]:
    compute_s = None if tflops is None else size.compute_s(ranks, tflops)
    return {
        "tokens": size.tokens,
        "width": size.width,
        "layout": cost.layout,
        "schedule": cost.by,
        "sent_elements": cost.sent,
        "formula_elements": cost.formula,
        "exchange_seconds": cost.seconds,
        "compute_seconds": compute_s,
        "layer_seconds": None if compute_s is None else compute_s + cost.seconds,
        "weights_elements": cost.weights,
    }


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    with_times = rows[0]["layer_seconds"] is not None
    names = ["tokens x width", "layout", "by", "sent, M", "formula, M", "exchanges, ms", "weights, M"]
    for name in names + ["layer, ms"] * with_times:
        table.add_column(name, justify="left" if name in names[:3] else "right", no_wrap=True)
    for number, row in enumerate(rows):
        millions = (f"{row[key] / 1e6:,.1f}" for key in ("sent_elements", "formula_elements"))
        cells = [row["layout"], row["schedule"], *millions, f"{1e3 * row['exchange_seconds']:,.2f}"]
        cells += [f"{row['weights_elements'] / 1e6:,.2f}"] + [f"{1e3 * (row['layer_seconds'] or 0):,.2f}"] * with_times
        is_first = (
            not number or rows[number - 1]["tokens"] != row["tokens"] or rows[number - 1]["width"] != row["width"]
        )
        table.add_row(f"{row['tokens']:,} x {row['width']:,}" if is_first else "", *cells)
    return table


if __name__ == "__main__":
    main(app)
