# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: pictures of a schedule, of a simulated or recorded training step, and of how algorithms scale."""

from __future__ import annotations

from pathlib import Path

from commrt.algorithms.catalogue import ALGORITHMS, DIRECT, GOSSIP
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.local import LocalSGD
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import ITEMS, QUANTIZERS, wire_nbytes
from commrt.tools.commands.options import ShapeOptions, StepOptions, compute_of, workload_of
from commrt.tools.commands.simulate import ExchangeEstimate, StepEstimate
from commrt.tools.commands.verify import choose
from commrt.tools.pictures.drawing import draw_recorded_step, draw_scaling, draw_schedule, draw_simulated_step
from commrt.tools.pictures.files import require_picture, save_picture
from commrt.tools.pictures.traces import read_spans
from commrt.tools.planning.timeline import blocking_step, overlapped_step

__all__ = ["draw_recorded", "draw_scaling_of", "draw_schedule_of", "draw_step"]

RANK_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def draw_schedule_of(name: str, shape: ShapeOptions, ranks: int, cluster: str, out: str) -> None:
    """Draw the schedule of an algorithm; raise `UsageError` for what cannot be drawn."""
    algorithm = choose(name, shape, Cluster.named(cluster))
    require_picture(out)
    save_picture(draw_schedule(algorithm.schedule(0, ranks)), out)


def draw_recorded(file: str, step: int | None, out: str) -> None:
    """Draw `step` of the run whose timeline is `file`, or a typical one; raise `UsageError`."""
    require_picture(out)
    figure = draw_recorded_step(read_spans(file), Path(file).name, step)
    if figure is None:
        raise UsageError(f"{file} holds no training step: record one, as examples/mnist/train.py --trace does")
    save_picture(figure, out)


def draw_step(name: str, options: StepOptions, shape: ShapeOptions, out: str) -> None:
    """Draw a simulated training step; raise `UsageError` for what cannot be drawn."""
    cluster = Cluster.named(options.cluster)
    algorithm = choose(name, shape, cluster)
    require_picture(out)
    if isinstance(algorithm, Gossip):
        raise UsageError("gossip exchanges between steps: draw its schedule, or how it scales")
    if isinstance(algorithm, LocalSGD):
        raise UsageError("local SGD exchanges between steps: draw its schedule, or use commrt simulate local")
    step = StepEstimate.of(algorithm, options, cluster)
    pricing, nbytes = step.exchange.pricing, step.exchange.nbytes
    ways = {
        "after the\nbackward pass": blocking_step(pricing, nbytes, step.compute_s),
        f"under it, buckets\nof {options.bucket_cap_mb:g} MB": overlapped_step(pricing, step.buckets, step.compute_s),
    }
    place = f"{options.ranks:,} ranks of {cluster.name}"
    title = f"{step.workload.name} on {place}: {pricing.schedule.name}, {options.wire}"
    save_picture(draw_simulated_step(title, ways, pricing.phases(nbytes)), out)


def draw_scaling_of(options: StepOptions, out: str) -> None:
    """Draw how all algorithms scale up to `options.ranks`; raise `UsageError` for what cannot be drawn."""
    require_picture(out)
    cluster, workload = Cluster.named(options.cluster), workload_of(options.model)
    compute_s, _ = compute_of(workload, cluster, options.batch, options.compute_ms)
    nbytes = wire_nbytes(workload.numel, ITEMS[options.wire])
    most = min(cluster.ranks(), options.ranks)
    counts = [ranks for ranks in RANK_COUNTS if ranks <= most]
    if len(counts) < 2:
        raise UsageError(f"{most:g} ranks: how algorithms scale is drawn from {RANK_COUNTS[0]} ranks on; give more")
    efficiencies = {}
    left_out = {DIRECT} if cluster.between.ring_count > 1 else {DIRECT, "rings"}  # one ring is the ring
    plain = [name for name in (*ALGORITHMS, GOSSIP) if name not in left_out]
    for name in [DIRECT] if options.wire in QUANTIZERS else plain:
        algorithm = choose(name, ShapeOptions(), cluster)
        estimates = (ExchangeEstimate(algorithm, ranks, cluster, nbytes, options.wire) for ranks in counts)
        efficiencies[name] = [compute_s / (compute_s + each.price.seconds) for each in estimates]
    where = f"exchanged after the step, on {cluster.name}"
    title = f"{workload.name}, {options.wire}, {where} ({1e3 * compute_s:.1f} ms to compute)"
    save_picture(draw_scaling(title, counts, efficiencies), out)
