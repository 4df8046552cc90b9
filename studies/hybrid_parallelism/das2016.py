# SPDX-License-Identifier: Apache-2.0
"""Compare prices with a published scaling study: ``python studies/hybrid_parallelism/das2016.py``. Nothing is trained.

Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016 (arXiv 1602.06709), give six
speed-ups over one node. The clusters are described in the folder clusters. One number is fitted: the share of full
speed that kernels reach with 4 images per node. All other assumptions are printed. ``--fit`` fits that number again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from plan_hybrid import predict  # of this folder

from commrt.pricing.cluster import Cluster
from commrt.tools.commands.arguments import StepOptions
from commrt.tools.commands.choosing import workload_called

__all__ = ["ASSUMPTIONS", "POINTS", "Point", "Result", "result"]

CLUSTERS = Path(__file__).parent / "clusters"
CLOSE = 0.2
"""A predicted speed-up is near the published one if it differs by at most this part."""
OTHER_BATCHES = 256, 1024, 2048
TRIED = [round(0.6 + 0.02 * each, 2) for each in range(21)]
FITTED_SAMPLES = 4


@dataclass(frozen=True)
class Point:
    """One published speed-up over one node with the same number of samples in a step."""

    name: str
    cluster: str
    """File in the folder clusters, without its ending."""
    model: str
    nodes: int
    samples: int
    """Of all nodes, in a step."""
    published: float
    source: str
    is_fitted_to: bool = True


POINTS = (
    Point("VGG-A, 128 nodes", "das2016-aries", "vgg_a", 128, 512, 90.0, "abstract"),
    Point("VGG-A, 64 nodes", "das2016-fdr", "vgg_a", 64, 256, 53.0, "abstract"),
    Point("OverFeat-FAST, 64 nodes", "das2016-fdr", "overfeat_fast", 64, 256, 42.0, "abstract"),
    Point("VGG-A, 16 AWS nodes", "das2016-aws", "vgg_a", 16, 256, 14.2, "recalled; abstract: about 14"),
    Point("OverFeat-FAST, 16 AWS nodes", "das2016-aws", "overfeat_fast", 16, 256, 11.9, "recalled"),
    Point("CD-DNN, 16 nodes", "das2016-fdr", "cd_dnn", 16, 1024, 6.5, "abstract", is_fitted_to=False),
)

ASSUMPTIONS = """\
Recalled from the paper, not confirmed: what one node computes (28 images of VGG-A, 87 of OverFeat-FAST and 4,600 frames
of CD-DNN per second), 2.36 TFLOPS of a node and 1.67 of a c4.8xlarge, both AWS speed-ups, Aries for 128 nodes and FDR
InfiniBand for 64, the first layer of OverFeat-FAST, and the layers of CD-DNN.
Assumed: links of 8 GB/s and 2 us (Aries), 6 GB/s and 2 us (FDR), and 1.15 GB/s and 50 us (AWS), each way at once.
Assumed: an AWS node computes at 1.67 / 2.36 of the speed above: 19.8 and 61.6 images per second.
Assumed: 256 images in a step on AWS; for CD-DNN 1,024 frames in a step, and FDR InfiniBand.
Assumed: kernels reach full speed from 64 samples per node on; from 4 to 64 the share is linear in log2 of the samples.
Assumed: one node computes all samples of a step at full speed.
Model: fp32; buckets of 25 MiB that overlap the backward pass and leave one after the other; computing waits for
activations; adding and packing take no time; all nodes are equally fast."""
"""What the predictions rest on, besides the fitted number."""


@dataclass(frozen=True)
class Result:
    """A point, and what commrt predicts for it."""

    point: Point
    data_parallel: float
    """Speed-up with data parallelism alone."""
    hybrid: float
    groups: tuple[int, ...]
    """Of the fully connected layers."""

    @property
    def off(self) -> float:
        """Relative error of the hybrid prediction."""
        return self.hybrid / self.point.published - 1

    @property
    def is_close(self) -> bool:
        """Return True if the prediction is within `CLOSE`."""
        return abs(self.off) <= CLOSE

    def record(self) -> dict[str, object]:
        """Return the result for JSON."""
        names = ("name", "nodes", "samples", "published", "source")
        told = {name: getattr(self.point, name) for name in names}
        return told | {"data_parallel": self.data_parallel, "hybrid": self.hybrid, "off": self.off}


def result(point: Point, **changes: object) -> Result:
    """Return the prediction for `point`, on its cluster with `changes`."""
    cluster = replace(Cluster.named(str(CLUSTERS / f"{point.cluster}.toml")), **changes)
    workload = workload_called(point.model)
    options = StepOptions(point.model, point.nodes, batch=point.samples // point.nodes)
    found = predict(options, workload, cluster)
    dense = [number for number, layer in zip(found.hybrid.groups, workload.layers, strict=True) if layer.inputs]
    return Result(point, found.speed_up(found.data_parallel), found.speed_up(found.hybrid), tuple(dense))


def efficiency(share: float, full_from: int = 64) -> dict[str, dict[int, float]]:
    """Return the change that makes kernels reach `share` of full speed at 4 samples, and all of it from `full_from`."""
    return {"kernel_efficiency": {FITTED_SAMPLES: share, full_from: 1.0}}


def spread(results: Sequence[Result]) -> float:
    """Return the root mean square of the logarithmic errors: 0.1 is about 10 %."""
    logs = [log(each.hybrid / each.point.published) for each in results]
    return float((sum(each * each for each in logs) / len(logs)) ** 0.5)


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the table of points."""
    yield "| point | samples | published | data parallel alone | hybrid | hybrid against published | groups | source |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in results:
        point = each.point
        groups = " ".join(map(str, each.groups))
        speeds = f"{point.published:g}x | {each.data_parallel:.1f}x | {each.hybrid:.1f}x | {each.off:+.0%}"
        yield f"| {point.name} | {point.samples:,} | {speeds} | {groups} | {point.source} |"


def sensitivities() -> Iterator[str]:
    """Yield how the result changes with what was assumed."""
    changed = {
        "kernels always at full speed": [result(each, **efficiency(1.0)) for each in POINTS],
        "full speed from 16 samples on": [result(each, **efficiency(fitted_share(), 16)) for each in POINTS],
        "AWS nodes as fast as the others": [result(each, compute=compute_of_others()) for each in POINTS],
    }
    for what, results in changed.items():
        speeds = ", ".join(f"{each.hybrid:.1f}x ({each.off:+.0%})" for each in results)
        yield f"- {what}: {speeds}; {sum(each.is_close for each in results)} of {len(results)} within {CLOSE:.0%}"


def compute_of_others() -> dict[str, float]:
    """Return the speeds of one node of the other clusters."""
    return dict(Cluster.named(str(CLUSTERS / "das2016-fdr.toml")).compute)


def fitted_share() -> float:
    """Return the fitted number, as the files of the clusters have it; raises if they differ."""
    files = sorted(CLUSTERS.glob("das2016-*.toml"))
    (share,) = {Cluster.named(str(file)).kernel_efficiency[FITTED_SAMPLES] for file in files}
    return share


def fit() -> Iterator[str]:
    """Yield how close the points come with each tried share; CD-DNN, whose batch is unknown, is left out."""
    yield "| share of full speed at 4 samples per node | root mean square error | within 20 % |\n|---|---|---|"
    errors = {}
    for share in TRIED:
        results = [result(point, **efficiency(share)) for point in POINTS if point.is_fitted_to]
        errors[share] = spread(results)
        yield f"| {share:g} | {errors[share]:.1%} | {sum(each.is_close for each in results)} of {len(results)} |"
    yield f"least error: {min(errors, key=errors.__getitem__):g}"


def other_batches() -> Iterator[str]:
    """Yield why the last point is off: its batch is not known."""
    point = POINTS[-1]
    results = [result(replace(point, samples=samples)) for samples in OTHER_BATCHES]
    said = ", ".join(f"{each.point.samples:,}: {each.hybrid:.1f}x ({each.off:+.0%})" for each in results)
    yield f"{point.name}: the number of frames in a step is unknown, and decides the result. {said}."


def report() -> Iterator[str]:
    """Yield all lines of the comparison."""
    results = list(map(result, POINTS))
    yield "Speed-ups over one node: published by Das et al. (2016), and predicted by commrt. None was measured here.\n"
    yield from table(results)
    yield f"\nwithin {CLOSE:.0%}: {sum(each.is_close for each in results)} of {len(results)}, with one fitted number"
    yield from other_batches()
    yield f"\nFitted: kernels reach {fitted_share():g} of full speed with 4 images per node (--fit tries others)."
    yield "Three of the points have 4 images per node; the AWS points have 16, and CD-DNN 64 frames."
    yield ""
    yield ASSUMPTIONS
    yield "\nHybrid speed-ups, in the order of the table, if one assumption is changed:"
    yield from sensitivities()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="try other kernel efficiencies at 4 images per node")
    parser.add_argument("--json", action="store_true", help="print the points as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps([result(point).record() for point in POINTS]))
        return
    for line in fit() if options.fit else report():
        print(line, flush=True)


if __name__ == "__main__":
    main()
