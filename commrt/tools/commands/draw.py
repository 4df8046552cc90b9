# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: pictures of schedules, of simulated or recorded steps, and of scaling.

Each command refuses a file that it could not write before it works, reads those that its options
name, and writes that one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commrt.algorithms.catalogue import ALGORITHMS, DIRECT, GOSSIP
from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.local_sgd.policy import LocalSGD
from commrt.pricing.cluster import Cluster
from commrt.quantizer import QUANTIZERS
from commrt.threads.chrome_trace import merge
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.choosing import choose, compute_of, workload_called
from commrt.tools.commands.estimates import ExchangeEstimate, StepEstimate
from commrt.tools.pictures.drawing import draw_schedule
from commrt.tools.pictures.files import require_picture, save_picture
from commrt.tools.pictures.recorded_step import draw_recorded_step
from commrt.tools.pictures.scaling_drawing import draw_scaling
from commrt.tools.pictures.simulated_step import draw_simulated_step
from commrt.tools.pictures.timelines import read_spans
from commrt.tools.planning.phases import phases
from commrt.tools.planning.timeline import blocking_step, overlapped_step
from commrt.tools.planning.wires import ITEMS, wire_nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANK_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _save(figure: Figure, out: str) -> None:
    save_picture(figure, out)
    print(f"wrote {out}")


def schedule(
    algorithm: opt.AlgorithmName,
    out: opt.Out,
    shape: opt.ShapeOptions,
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="Number of ranks, at most 64.")] = 4,
    cluster: opt.ClusterName = opt.CLUSTER,
) -> None:
    """Draw a schedule: an arrow for each transfer."""
    chosen = choose(algorithm, shape, Cluster.named(cluster))
    require_picture(out)
    _save(draw_schedule(chosen.schedule(0, ranks)), out)


def recorded(
    file: Annotated[str, typer.Argument(help="The timeline of a run, such as trace.json.")],
    out: opt.Out,
    number: Annotated[
        int | None,
        typer.Option("--step", min=0, show_default="a typical one", help="The step to draw."),
    ] = None,
) -> None:
    """Draw a step of a run."""
    require_picture(out)
    figure = draw_recorded_step(read_spans(file), Path(file).name, number)
    if figure is None:
        raise UsageError(
            f"{file} holds no training step: record one, as examples/mnist/train.py --trace does"
        )
    _save(figure, out)


def merged(
    directory: Annotated[str, typer.Argument(help="Where ranks wrote theirs: COMMRT_TRACE.")],
) -> None:
    """Merge the timelines of all ranks into one trace.json, for ui.perfetto.dev."""
    print(merge(Path(directory)))


def step(
    algorithm: opt.AlgorithmName, out: opt.Out, options: opt.StepOptions, shape: opt.ShapeOptions
) -> None:
    """Draw a simulated training step, and what of its exchange is not hidden."""
    cluster = Cluster.named(options.cluster)
    chosen = choose(algorithm, shape, cluster)
    require_picture(out)
    if isinstance(chosen, Gossip | LocalSGD):
        raise UsageError(
            f"{algorithm} exchanges between steps: draw its schedule, or use commrt simulate"
        )
    found = StepEstimate.of(chosen, options, cluster)
    pricing = found.exchange.pricing
    nbytes = found.exchange.nbytes
    ways = {
        "after the\nbackward pass": blocking_step(pricing, nbytes, found.compute_s),
        f"under it, buckets\nof {options.bucket_cap_mb:g} MB": overlapped_step(
            pricing, found.buckets, found.compute_s
        ),
    }
    place = f"{options.ranks:,} ranks of {cluster.name}"
    title = f"{found.workload.name} on {place}: {pricing.schedule.name}, {options.wire}"
    _save(draw_simulated_step(title, ways, phases(pricing, nbytes)), out)


def scaling(
    out: opt.Out,
    model: opt.Model,
    ranks: Annotated[
        int, typer.Option(min=1, max=65536, help="The largest number of ranks.")
    ] = 4096,
    cluster: opt.ClusterName = opt.CLUSTER,
    wire: opt.WireDtype = opt.FP32,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
) -> None:
    """Draw the efficiency of all algorithms over the number of ranks."""
    require_picture(out)
    described = Cluster.named(cluster)
    workload = workload_called(model)
    compute_s, _ = compute_of(workload, described, batch, compute_ms)
    nbytes = wire_nbytes(workload.numel, ITEMS[wire])
    most = min(described.ranks(), ranks)
    counts = [count for count in RANK_COUNTS if count <= most]
    if len(counts) < 2:
        raise UsageError(
            f"{most:g} ranks: how algorithms scale is drawn from {RANK_COUNTS[0]} ranks on; give"
            " more"
        )
    efficiencies = {}
    left_out = {DIRECT} if described.ring_count > 1 else {DIRECT, "rings"}  # one ring is the ring
    plain = [name for name in (*ALGORITHMS, GOSSIP) if name not in left_out]
    for name in [DIRECT] if wire in QUANTIZERS else plain:
        algorithm = choose(name, opt.ShapeOptions(), described)
        estimates = (
            ExchangeEstimate(algorithm, count, described, nbytes, wire) for count in counts
        )
        efficiencies[name] = [compute_s / (compute_s + each.price.seconds) for each in estimates]
    where = f"exchanged after the step, on {described.name}"
    title = f"{workload.name}, {wire}, {where} ({1e3 * compute_s:.1f} ms to compute)"
    _save(draw_scaling(title, counts, efficiencies), out)
