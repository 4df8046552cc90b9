# SPDX-License-Identifier: Apache-2.0
"""``commrt plan collective``: which schedule torch.distributed's backend takes, and why.

Prices as the backend does on CPUs, with `pricing.selection`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated

import typer
from rich.console import Console

from commrt.algorithms.catalogue import COLLECTIVES
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import PROVEN_RANKS, Choice, choices, size_class
from commrt.pricing.slices import slice_nbytes, slots_of
from commrt.proof.replay import prove
from commrt.proof.spec import collective_of
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.output import json_of, table_of
from commrt.tools.commands.price_words import about, gains

MOST_RANKS = 4096
ONE_HOST = "host"
"""The cluster that the backend takes if COMMRT_CLUSTER is not set, on one host."""
DEVICE = "cpu"
"""Whose slices are priced: a cluster does not say whether its ranks have GPUs."""
PRICED_EMPTY = {"barrier", "all_to_all"}
"""They are priced for empty pieces: in an all-to-all, no rank knows the sizes of all."""


def collective(
    name: Annotated[
        str, typer.Argument(help=f"A collective of torch.distributed: {', '.join(COLLECTIVES)}.")
    ],
    nbytes: Annotated[
        float | None,
        typer.Option(
            min=0, callback=opt.below(1e18), help="Of the tensor that holds all ranks' pieces."
        ),
    ] = None,
    ranks: opt.Ranks = 4,
    cluster: opt.ClusterName = ONE_HOST,
    as_json: opt.Json = False,
) -> None:
    """Say which schedule the torch.distributed backend takes for a collective, and why."""
    if nbytes is None and name != "barrier":
        raise UsageError(
            "say how much is exchanged: --nbytes, of the tensor that holds all ranks' pieces"
        )
    if ranks > MOST_RANKS:
        raise UsageError(
            f"--ranks {ranks}: a collective is planned up to {MOST_RANKS:,} ranks, in some seconds"
        )
    chosen = Cluster.named(cluster)
    pieces = 1 if slots_of(name, ranks) == 1 else ranks
    piece_nbytes = 0 if name in PRICED_EMPTY else ceil((nbytes or 0.0) / pieces)
    slices = max(1, ceil(piece_nbytes / slice_nbytes(name, ranks, DEVICE)))
    priced_nbytes = size_class(min(piece_nbytes, slice_nbytes(name, ranks, DEVICE)))
    found = choices(chosen, name, range(ranks), priced_nbytes)
    best = found[0]
    if ranks <= PROVEN_RANKS:
        prove(best.schedule, collective_of(name, ranks, best.schedule.chunks, 0))
    if as_json:
        record = {
            "cluster": chosen.name,
            "collective": name,
            "ranks": ranks,
            "nbytes": nbytes,
            "priced_nbytes": priced_nbytes,
            "slices": slices,
            "best": best.name,
            "reason": _choice_reason(found),
            "schedules": [_record(each) for each in found],
        }
        print(json_of(record))
        return
    title = f"{name} of {nbytes or 0:,.0f} bytes among {ranks:,} ranks of {chosen.name}"
    cells = (
        (
            each.name,
            f"{1e3 * each.price.seconds:.3f}",
            f"{1e3 * _latency_s(each):.3f}",
            f"{each.price.steps:,}",
        )
        for each in found
    )
    Console().print(table_of(title, ("schedule", "ms", "latencies", "steps"), cells))
    print(_priced(name, priced_nbytes, slices))
    print(_choice_reason(found))
    print(f"force one: COMMRT_SCHEDULES={name}={found[-1].name}")
    print(about(chosen))


def _record(choice: Choice) -> dict[str, object]:
    return {
        "schedule": choice.name,
        "seconds": choice.price.seconds,
        "latency_seconds": _latency_s(choice),
        "steps": choice.price.steps,
    }


def _priced(name: str, priced_nbytes: int, slices: int) -> str:
    if name in PRICED_EMPTY:
        return "priced for empty pieces, as a rank does not know the sizes of all"
    if slices == 1:
        return f"priced for pieces of {priced_nbytes:,} bytes, as all sizes down to half of that"
    return (
        f"priced for one of {slices:,} slices, as pieces of {priced_nbytes:,} bytes; on GPUs slices"
        " are larger"
    )


def _latency_s(choice: Choice) -> float:
    """Return the part of a price that does not depend on the number of bytes."""
    return choice.pricing.price(0.0).seconds


def _choice_reason(found: Sequence[Choice]) -> str:
    """Return how the best schedule compares with the second best."""
    best, *others = found
    if not others:
        return f"{best.name}: the only schedule for so many ranks"
    other = others[0]
    sides = gains(
        other.price.seconds - best.price.seconds, _latency_s(other) - _latency_s(best), digits=3
    )
    return f"{best.name} against {other.name}: {sides}"
