# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: pictures of a schedule, of a simulated or recorded training step, and of how algorithms scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.algorithms.catalogue import ALGORITHMS, DIRECT, GOSSIP
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.local import LocalSGD
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.wires import ITEMS, QUANTIZERS
from commrt.schedule import Algorithm
from commrt.tools.commands.options import CLUSTER, ExchangeOptions, ShapeOptions, compute_of, workload_of
from commrt.tools.commands.simulate import ExchangeEstimate
from commrt.tools.commands.verify import choose
from commrt.tools.pictures.drawing import draw_recorded_step, draw_scaling, draw_schedule, draw_simulated_step
from commrt.tools.pictures.files import require_picture, save_picture
from commrt.tools.pictures.traces import read_spans
from commrt.tools.planning.timeline import blocking_step, overlapped_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCALING", "draw_recorded", "run"]

SCALING = "scaling"
RANK_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def run(algorithm: Algorithm | None, options: ExchangeOptions, out: str) -> None:
    """Draw the schedule of `algorithm`, or with a model a training step; None draws how all algorithms scale.

    Raise `UsageError` for what cannot be drawn.
    """
    require_picture(out)
    options.check_numbers()
    if algorithm is None:
        figure = _scaling(options)
    elif options.model is None:
        figure = draw_schedule(algorithm.schedule(0, options.ranks))
    else:
        figure = _simulated_step(algorithm, options, options.model)
    save_picture(figure, out)


def draw_recorded(file: str, step: int | None, out: str) -> None:
    """Draw `step` of the run whose timeline is `file`, or a typical one; raise `UsageError`."""
    require_picture(out)
    figure = draw_recorded_step(read_spans(file), Path(file).name, step)
    if figure is None:
        raise UsageError(f"{file} holds no training step: record one, as examples/mnist/train.py --trace does")
    save_picture(figure, out)


def _simulated_step(algorithm: Algorithm, options: ExchangeOptions, model: str) -> Figure:
    cluster = Cluster.named(options.cluster or CLUSTER)
    if isinstance(algorithm, Gossip):
        raise UsageError("gossip exchanges between steps: draw its schedule, or how it scales")
    if isinstance(algorithm, LocalSGD):
        raise UsageError("local SGD exchanges between steps: draw its schedule, or use commrt simulate local")
    workload = workload_of(model)
    compute_s, _ = compute_of(options, workload, cluster)
    estimate = ExchangeEstimate(algorithm, options, cluster)
    pricing, nbytes = estimate.pricing, estimate.nbytes
    buckets = workload.buckets(options.bucket_cap_mb * 2**20, ITEMS[options.wire])
    ways = {
        "after the\nbackward pass": blocking_step(pricing, nbytes, compute_s),
        f"under it, buckets\nof {options.bucket_cap_mb:g} MB": overlapped_step(pricing, buckets, compute_s),
    }
    place = f"{options.ranks:,} ranks of {cluster.name}"
    title = f"{workload.name} on {place}: {pricing.schedule.name}, {options.wire}"
    return draw_simulated_step(title, ways, pricing.phases(nbytes))


def _scaling(options: ExchangeOptions) -> Figure:
    cluster = Cluster.named(options.cluster or CLUSTER)
    if options.model is None:
        raise UsageError("efficiency is of a training step: give --model")
    workload = workload_of(options.model)
    compute_s, _ = compute_of(options, workload, cluster)
    most = min(cluster.ranks(), options.ranks)
    counts = [ranks for ranks in RANK_COUNTS if ranks <= most]
    if len(counts) < 2:
        raise UsageError(f"{most:g} ranks: how algorithms scale is drawn from {RANK_COUNTS[0]} ranks on; give more")
    efficiencies = {}
    left_out = {DIRECT} if cluster.between.ring_count > 1 else {DIRECT, "rings"}  # one ring is the ring
    plain = [name for name in (*ALGORITHMS, GOSSIP) if name not in left_out]
    for name in [DIRECT] if options.wire in QUANTIZERS else plain:
        scaled = [replace(options, ranks=ranks) for ranks in counts]
        algorithm = choose(name, ShapeOptions(), cluster)
        exchange_s = [ExchangeEstimate(algorithm, each, cluster).price().seconds for each in scaled]
        efficiencies[name] = [compute_s / (compute_s + seconds) for seconds in exchange_s]
    where = f"exchanged after the step, on {cluster.name}"
    title = f"{workload.name}, {options.wire}, {where} ({1e3 * compute_s:.1f} ms to compute)"
    return draw_scaling(title, counts, efficiencies)
