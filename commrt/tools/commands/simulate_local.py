# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate local``: the steps of local SGD, by how late averages may be. Needs no torch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from commrt.algorithms.local import LocalSGD
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.wires import ITEMS
from commrt.tools.commands.json_output import json_of
from commrt.tools.commands.options import CLUSTER, ExchangeOptions, LocalOptions, compute_of
from commrt.tools.commands.simulate import ExchangeEstimate, quantizer_sentence
from commrt.tools.planning.local_steps import LocalSteps
from commrt.tools.planning.timeline import overlapped_step
from commrt.tools.planning.workload import Workload

__all__ = ["run"]

NOT_HIDDEN = "none within the period"


def run(local: LocalOptions, options: ExchangeOptions, as_json: bool) -> None:
    """Print what steps of local SGD take, for several delays; raises `UsageError`."""
    _require_step(options)
    cluster = Cluster.named(options.cluster or CLUSTER)
    algorithm = local.algorithm(options.wire)
    exchange = ExchangeEstimate(algorithm.inner, options, cluster)
    assert exchange.workload is not None  # noqa: S101  # for mypy
    compute_s, _ = compute_of(options, exchange.workload, cluster)
    steps = LocalSteps.priced(exchange.pricing, exchange.nbytes, compute_s, algorithm.period, algorithm.fragments)
    record = _record(algorithm, exchange, exchange.workload, steps)
    if as_json:
        print(json_of(record))
    else:
        _show(record, exchange, algorithm)


def _require_step(options: ExchangeOptions) -> None:
    if options.model is None or options.nbytes is not None:
        raise UsageError("local SGD is simulated as training steps: give --model, and leave --nbytes out")
    for name, value in (("--jitter", options.jitter), ("--steps", options.steps)):
        if value is not None:
            raise UsageError(f"local SGD is simulated with ranks of equal speed: leave {name} out")
    options.check()


def _record(algorithm: LocalSGD, exchange: ExchangeEstimate, workload: Workload, steps: LocalSteps) -> dict[str, Any]:
    """Return the estimate for JSON."""
    options, compute_s = exchange.options, steps.compute_s
    buckets = workload.buckets(options.bucket_cap_mb * 2**20, ITEMS[options.wire])
    synchronous_s = overlapped_step(exchange.pricing, buckets, compute_s).seconds
    delays = [(delay, steps.step_s(delay)) for delay in delays_to_try(algorithm)]
    return {
        "algorithm": str(algorithm),
        "ranks": options.ranks,
        "cluster": exchange.cluster.name,
        "model": workload.name,
        "wire": options.wire,
        "nbytes": exchange.nbytes,
        "seconds": steps.exchange_s,
        "compute_seconds": compute_s,
        "period": algorithm.period,
        "delay": algorithm.delay,
        "fragments": algorithm.fragments,
        "synchronous": _times(synchronous_s, compute_s),
        "delays": [{"delay": delay} | _times(step_s, compute_s) for delay, step_s in delays],
        "hiding_delay": steps.hiding_delay,
    }


def _times(step_s: float, compute_s: float) -> dict[str, float]:
    return {"step_seconds": step_s, "exposed_seconds": step_s - compute_s, "efficiency": compute_s / step_s}


def delays_to_try(algorithm: LocalSGD) -> list[int]:
    """Return 0, the powers of two below the period, the period, and the delay of `algorithm`, in order.

    >>> delays_to_try(LocalSGD(period=10, delay=3))
    [0, 1, 2, 3, 4, 8, 10]
    """
    powers = [2**i for i in range((algorithm.period - 1).bit_length())]
    return sorted({0, *powers, algorithm.period, algorithm.delay})


def _show(record: dict[str, Any], exchange: ExchangeEstimate, algorithm: LocalSGD) -> None:
    cluster, size = exchange.cluster, f"{record['nbytes'] / 1e6:,.1f} MB"
    parts = f", in {record['fragments']:,} fragments" * (record["fragments"] > 1)
    place = f"{record['ranks']:,} ranks of {cluster.name}"
    print(f"{algorithm.inner} on {place}: {size} in {1e3 * record['seconds']:.3f} ms once per period{parts}")
    if exchange.pricing.quantizer is not None:
        coding_s = 2 * algorithm.fragments * exchange.pricing.code_s(exchange.nbytes / algorithm.fragments)
        print(quantizer_sentence(coding_s, cluster))
    Console().print(_table(record))
    hiding = record["hiding_delay"]
    print(f"smallest delay that hides the exchange: {NOT_HIDDEN if hiding is None else hiding}")
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def _table(record: dict[str, Any]) -> Table:
    """Return a row per delay, the one that was asked for in bold."""
    compute = f"{1e3 * record['compute_seconds']:.2f} ms to compute"
    table = Table("delay", title=f"{record['model']}, {record['wire']} wire, {compute}, period {record['period']:,}")
    for column in ("step, ms", "not hidden, ms", "efficiency"):
        table.add_column(column, justify="right")
    for each in ({"delay": "synchronous"} | record["synchronous"], *record["delays"]):
        times = (f"{1e3 * each[key]:.2f}" for key in ("step_seconds", "exposed_seconds"))
        is_asked = each["delay"] == record["delay"]
        table.add_row(str(each["delay"]), *times, f"{each['efficiency']:.1%}", style="bold" if is_asked else None)
    return table
