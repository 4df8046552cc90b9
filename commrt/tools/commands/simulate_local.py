# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate local``: prints what steps of local SGD take, by how late averages may be.

The numbers are those of `planning/local_steps`. Needs no torch.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from commrt.local_sgd.policy import LocalSGD
from commrt.pricing.cluster import Cluster
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.estimates import ExchangeEstimate, StepEstimate, times
from commrt.tools.commands.output import json_of
from commrt.tools.commands.price_words import about, quantizer_sentence
from commrt.tools.commands.simulate import step_table
from commrt.tools.planning.local_steps import LocalSteps
from commrt.tools.planning.python_calls import short_name
from commrt.tools.planning.timeline import overlapped_step


def local(options: opt.StepOptions, averaging: opt.LocalOptions, as_json: opt.Json = False) -> None:
    """Estimate steps of local SGD, by how late averages may be."""
    algorithm = averaging.algorithm(options.wire)
    found = StepEstimate.of(algorithm.inner, options, Cluster.named(options.cluster))
    exchange = found.exchange
    steps = LocalSteps.priced(
        exchange.pricing, exchange.nbytes, found.compute_s, algorithm.period, algorithm.fragments
    )
    record = _record(algorithm, found, steps)
    if as_json:
        print(json_of(record))
    else:
        _show(record, exchange, algorithm)


def _record(algorithm: LocalSGD, step: StepEstimate, steps: LocalSteps) -> dict[str, Any]:
    exchange = step.exchange
    compute_s = step.compute_s
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
        "delays": [
            {"delay": delay} | times(steps.step_s(delay), compute_s)
            for delay in delays_to_try(algorithm)
        ],
        "hiding_delay": steps.hiding_delay,
    }


def delays_to_try(algorithm: LocalSGD) -> list[int]:
    """Return 0, powers of two below the period, the period and `algorithm`'s delay, in order.

    >>> delays_to_try(LocalSGD(period=10, delay=3))
    [0, 1, 2, 3, 4, 8, 10]
    """
    powers = [2**i for i in range((algorithm.period - 1).bit_length())]
    return sorted({0, *powers, algorithm.period, algorithm.delay})


def _show(record: dict[str, Any], exchange: ExchangeEstimate, algorithm: LocalSGD) -> None:
    cluster = exchange.cluster
    size = f"{record['nbytes'] / 1e6:,.1f} MB"
    parts = f", in {record['fragments']:,} fragments" * (record["fragments"] > 1)
    place = f"{record['ranks']:,} ranks of {cluster.name}"
    print(
        f"{short_name(algorithm.inner)} on {place}: {size} in {1e3 * record['seconds']:.3f} ms"
        f" once per period{parts}"
    )
    if exchange.pricing.quantizer is not None:
        coding_s = (
            2 * algorithm.fragments * exchange.pricing.code_s(exchange.nbytes / algorithm.fragments)
        )
        print(quantizer_sentence(coding_s, cluster))
    title = (
        f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to"
        f" compute, period {record['period']:,}"
    )
    rows = {
        "synchronous": record["synchronous"],
        **{str(each["delay"]): each for each in record["delays"]},
    }
    Console().print(step_table(title, "delay", rows, str(record["delay"])))
    hiding = record["hiding_delay"]
    print(
        "smallest delay that hides the exchange:"
        f" {'none within the period' if hiding is None else hiding}"
    )
    print(about(cluster))
