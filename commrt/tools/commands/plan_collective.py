# SPDX-License-Identifier: Apache-2.0
"""``commrt plan collective``: which schedule the torch.distributed backend takes, and why. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import PROVEN_RANKS, Choice, choices, size_class, slice_nbytes, slots_of
from commrt.proof.replay import prove
from commrt.proof.spec import collective_of
from commrt.tools.commands.json_output import json_of
from commrt.tools.commands.options import ClusterName, Json, Ranks, below
from commrt.tools.commands.plan import gains

__all__ = ["collective"]

MOST_RANKS = 4096
ONE_HOST = "host"
"""The cluster that the backend takes if COMMRT_CLUSTER is not set, on one host."""
DEVICE = "cpu"
"""Whose slices are priced: a cluster does not say whether its ranks have GPUs."""
UNKNOWN = {"barrier", "all_to_all"}
"""Collectives that the backend prices for empty pieces: in an all-to-all, no rank knows the sizes of all."""


def collective(
    name: Annotated[
        str,
        typer.Argument(
            help="A collective of torch.distributed: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
            "reduce, gather, scatter or barrier."
        ),
    ],
    nbytes: Annotated[
        float | None,
        typer.Option(
            min=0, callback=below(1e18), help="Bytes of the tensor that holds all ranks' pieces; not for barrier."
        ),
    ] = None,
    ranks: Ranks = 4,
    cluster: ClusterName = ONE_HOST,
    as_json: Json = False,
) -> None:
    """Say which schedule the torch.distributed backend takes for a collective, and why."""
    if nbytes is None and name != "barrier":
        raise UsageError("say how much is exchanged: --nbytes, of the tensor that holds all ranks' pieces")
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: a collective is planned up to {MOST_RANKS:,} ranks, in some seconds")
    chosen = Cluster.named(cluster)
    pieces = 1 if slots_of(name, ranks) == 1 else ranks
    piece_nbytes = 0 if name in UNKNOWN else ceil((nbytes or 0.0) / pieces)
    slices = max(1, ceil(piece_nbytes / slice_nbytes(name, ranks, DEVICE)))
    priced_nbytes = size_class(min(piece_nbytes, slice_nbytes(name, ranks, DEVICE)))
    found = choices(chosen, name, range(ranks), priced_nbytes)
    best = found[0]
    if ranks <= PROVEN_RANKS:
        prove(best.schedule, collective_of(name, ranks, best.schedule.chunks, 0))
    if as_json:
        record = {"cluster": chosen.name, "collective": name, "ranks": ranks, "nbytes": nbytes}
        record |= {"priced_nbytes": priced_nbytes, "slices": slices}
        print(json_of(record | {"best": best.name, "reason": _reason(found), "schedules": list(map(_record, found))}))
        return
    _show(f"{name} of {nbytes or 0:,.0f} bytes among {ranks:,} ranks of {chosen.name}", found)
    print(_priced(name, priced_nbytes, slices))
    print(_reason(found))
    print(f"force one: COMMRT_SCHEDULES={name}={found[-1].name}")
    print(f"{chosen.name}: {' '.join(chosen.about.split())}")


def _priced(collective: str, priced_nbytes: int, slices: int) -> str:
    """Return for what the times stand."""
    if collective in UNKNOWN:
        return "priced for empty pieces, as a rank does not know the sizes of all"
    if slices == 1:
        return f"priced for pieces of {priced_nbytes:,} bytes, as all sizes down to half of that"
    return f"priced for one of {slices:,} slices, as pieces of {priced_nbytes:,} bytes; on GPUs slices are larger"


def _record(choice: Choice) -> dict[str, Any]:
    return {
        "schedule": choice.name,
        "seconds": choice.seconds,
        "latency_seconds": choice.latency_s,
        "steps": choice.steps,
    }


def _show(title: str, found: Sequence[Choice]) -> None:
    table = Table(title=title)
    for name in ("schedule", "ms", "latencies", "steps"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for choice in found:
        cells = choice.name, f"{1e3 * choice.seconds:.3f}", f"{1e3 * choice.latency_s:.3f}", f"{choice.steps:,}"
        table.add_row(*cells, style="bold" if choice is found[0] else None)
    Console().print(table)


def _reason(found: Sequence[Choice]) -> str:
    """Return how the best schedule compares with the second best."""
    best, *others = found
    if not others:
        return f"{best.name}: the only schedule for so many ranks"
    other = others[0]
    sides = gains(other.seconds - best.seconds, other.latency_s - best.latency_s, digits=3)
    return f"{best.name} against {other.name}: {sides}"
