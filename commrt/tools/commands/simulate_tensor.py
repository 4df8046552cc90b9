# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate tensor``: what a transformer layer exchanges whose matrices are split. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from commrt.algorithms import summa
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.wires import CODINGS, ITEMS, wire_nbytes
from commrt.proof import matrix_products
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.tools.commands.json_output import json_of
from commrt.tools.commands.options import CLUSTER, ExchangeOptions, TensorOptions
from commrt.tools.planning.tensor_parallel import LayerCost, LayerSize, layer_costs

__all__ = ["RANKS", "run"]

RANKS, MOST_RANKS = 64, 256
MIN_WIDTH = 140
"""Of the table: names that are cut off cannot be told apart."""
SIZES = "6144x3072", "16384x4096", "98304x8192"
"""Priced if no --size is given: few, more and many tokens for each unit of width."""
ONLY_PRICED = "commrt splits no model for you: examples/summa.py shows how a program does it on commrt's backend"


def run(tensor: TensorOptions, options: ExchangeOptions, as_json: bool) -> None:
    """Prove and price the schedules of each layout and size, and print them; raises `UsageError`."""
    sizes, cluster = _checked(tensor, options)
    itemsize = int(wire_nbytes(1, ITEMS[options.wire]))
    costs = {size: layer_costs(cluster, options.ranks, size, itemsize) for size in sizes}
    for cost in {(cost.layout, cost.by): cost for each in costs.values() for cost in each}.values():
        _prove(cost, options.ranks)
    rows = [_record(size, cost, options.ranks, tensor.tflops) for size, each in costs.items() for cost in each]
    if as_json:
        print(json_of({"cluster": cluster.name, "ranks": options.ranks, "wire": options.wire, "layouts": rows}))
        return
    table = _table(f"a transformer layer on {options.ranks} ranks of {cluster.name}, {options.wire}", rows)
    Console(width=max(Console().width, MIN_WIDTH)).print(table)
    print(ONLY_PRICED)
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def _checked(tensor: TensorOptions, options: ExchangeOptions) -> tuple[list[LayerSize], Cluster]:
    if options.wire in CODINGS:
        raise UsageError(f"--wire {options.wire}: activations travel as numbers; give fp32, bf16 or fp16")
    if not 2 <= options.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {options.ranks}: a layer is split over 2 to {MOST_RANKS} ranks")
    if tensor.tflops is not None and not 0 < tensor.tflops < 1e9:
        raise UsageError(f"--tflops {tensor.tflops:g}: give what a rank computes per second, such as 300")
    cluster = Cluster.named(options.cluster or CLUSTER)
    cluster.require_room(options.ranks)
    return [_size(text) for text in tensor.sizes or SIZES], cluster


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
        there, back = (of_pass(cost.grid, slices=cost.slices) for of_pass in (summa.forward, summa.backward))
        prove(there, matrix_products.forward(cost.grid, there.chunks))
        prove(back, matrix_products.backward(cost.grid, back.chunks))


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
