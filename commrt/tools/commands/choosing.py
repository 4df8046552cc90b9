# SPDX-License-Identifier: Apache-2.0
"""What the options of a command describe: an algorithm, a model, and how long it computes.

Reads the file that --model names; prints nothing, and needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, cast

from commrt.algorithm import Algorithm
from commrt.algorithms.catalogue import ALGORITHMS, POLICIES, by_name
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.ring import Rings
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.tools.commands.arguments import FORMS, ShapeOptions
from commrt.tools.planning.efficiency import efficiency_at
from commrt.tools.planning.workload import MODELS, MOST_NUMEL, TRANSFORMERS, Workload

BATCH = 32
"""Images per rank, if an option does not say it."""
RINGS_FIELDS = {"rings": "count", "within": "per_node"}
"""Fields of `Rings` by the options that set them; other fields are called as the options."""


def choose(
    name: str, shape: ShapeOptions, cluster: Cluster | None = None, *, backups: int | None = None
) -> Algorithm:
    """Return the algorithm that the options describe; raises `UsageError` if they do not fit.

    Rings and double trees fit the nodes of the `cluster`, if their options do not say otherwise.
    """
    algorithm: Any = by_name(name)
    values: dict[str, Any] = {}
    for option, value in (shape.given() | {"--backups": backups}).items():
        if value is not None:
            values[_field(algorithm, option, name)] = value
    if "grid" in values:
        values["grid"] = _grid(values["grid"])
    if cluster is not None and isinstance(algorithm, DoubleTree):
        values.setdefault("within", cluster.gpus_per_node)
    if cluster is not None and isinstance(algorithm, Rings):
        per_node = values.setdefault("per_node", cluster.gpus_per_node)
        values.setdefault("count", min(cluster.ring_count, per_node))
    return cast("Algorithm", replace(algorithm, **values))


def _field(algorithm: Algorithm, option: str, name: str) -> str:
    """Return which field of `algorithm`, called `name`, an option sets."""
    field = option.removeprefix("--").replace("-", "_")
    if isinstance(algorithm, Rings):
        field = RINGS_FIELDS.get(field, field)
    if field not in _fields(algorithm):
        others = (each for each in (*ALGORITHMS, *POLICIES) if each != "rings")
        takers = [each for each in others if field in _fields(by_name(each))]
        takers += ["rings"] * (field in RINGS_FIELDS)
        raise UsageError(f"{option} is for {', '.join(takers)}, not for {name}: leave it out")
    return field


def _fields(algorithm: Any) -> set[str]:
    return {each.name for each in fields(algorithm)}


def _grid(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d+)x(\d+)", text)
    if sides is None:
        raise UsageError(
            f"--grid {text!r} is not a grid: write it as 4x3, ranks in a row x ranks in a column"
        )
    return int(sides[1]), int(sides[2])


def workload_called(model: str) -> Workload:
    """Return the workload that --model describes; raises `UsageError`."""
    if model in MODELS or model in TRANSFORMERS:
        return Workload.named(model)
    if model.endswith(".json"):
        return Workload.read(model)
    if sizes := re.fullmatch(r"transformer:(\d{1,9})x(\d{1,5})x(\d{1,9})", model):
        return Workload.transformer(*map(int, sizes.groups()))
    try:
        numel = int(float(model))
    except (ValueError, OverflowError):
        numel = 0
    if not 0 < numel <= MOST_NUMEL:
        raise UsageError(
            f"--model {model}: give {FORMS}, or a number of parameters, such as 25.6e6"
        )
    return Workload.even(numel, parts=100)


def compute_of(
    workload: Workload, cluster: Cluster, batch: int | None, compute_ms: float | None
) -> tuple[float, float | None]:
    """Return the seconds that a step computes, and a rank's images per second, None if unknown."""
    if compute_ms is not None:
        if batch is not None:
            raise UsageError(
                "--batch and --compute-ms both say how long a step computes: leave one out"
            )
        return compute_ms / 1e3, None
    if workload.name not in cluster.compute:
        raise UsageError(
            f"how long a step of {workload.name} computes on {cluster.name} is not known: give"
            " --compute-ms"
            + (
                f", or --model, of which it knows {', '.join(cluster.compute)}"
                if cluster.compute
                else ""
            )
        )
    rate = cluster.compute[workload.name] * efficiency_at(cluster, batch or BATCH)
    return (batch or BATCH) / rate, rate
