# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate local``: the steps of local SGD, by how late averages may be. Needs no torch."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from commrt.algorithms.local import LocalSGD
from commrt.pricing.cluster import Cluster
from commrt.tools.commands.json_output import json_of
from commrt.tools.commands.options import Json, LocalOptions, StepOptions
from commrt.tools.commands.simulate import ExchangeEstimate, StepEstimate, quantizer_sentence, step_table, times
from commrt.tools.planning.local_steps import LocalSteps
from commrt.tools.planning.timeline import overlapped_step

__all__ = ["local"]

NOT_HIDDEN = "none within the period"


def local(options: StepOptions, local: LocalOptions, as_json: Json = False) -> None:
    """Estimate steps of local SGD, by how late averages may be."""
    algorithm = local.algorithm(options.wire)
    step = StepEstimate.of(algorithm.inner, options, Cluster.named(options.cluster))
    exchange = step.exchange
    steps = LocalSteps.priced(exchange.pricing, exchange.nbytes, step.compute_s, algorithm.period, algorithm.fragments)
    record = _record(algorithm, step, steps)
    if as_json:
        print(json_of(record))
    else:
        _show(record, exchange, algorithm)


def _record(algorithm: LocalSGD, step: StepEstimate, steps: LocalSteps) -> dict[str, Any]:
    """Return the estimate for JSON."""
    exchange, compute_s = step.exchange, step.compute_s
    synchronous_s = overlapped_step(exchange.pricing, step.buckets, compute_s).seconds
    return {
        "algorithm": str(algorithm),
        "ranks": exchange.ranks,
        "cluster": exchange.cluster.name,
        "model": step.workload.name,
        "wire": exchange.wire,
        "nbytes": exchange.nbytes,
        "seconds": steps.exchange_s,
        "compute_seconds": compute_s,
        "period": algorithm.period,
        "delay": algorithm.delay,
        "fragments": algorithm.fragments,
        "synchronous": times(synchronous_s, compute_s),
        "delays": [{"delay": delay} | times(steps.step_s(delay), compute_s) for delay in delays_to_try(algorithm)],
        "hiding_delay": steps.hiding_delay,
    }


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
    title = (
        f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to compute, "
        f"period {record['period']:,}"
    )
    rows = {"synchronous": record["synchronous"], **{str(each["delay"]): each for each in record["delays"]}}
    Console().print(step_table(title, "delay", rows, str(record["delay"])))
    hiding = record["hiding_delay"]
    print(f"smallest delay that hides the exchange: {NOT_HIDDEN if hiding is None else hiding}")
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")
