# SPDX-License-Identifier: Apache-2.0
"""Which algorithm the options of a command describe."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, cast

from commrt.algorithms.catalogue import ALGORITHMS, POLICIES, by_name
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.ring import Rings
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.schedule import Algorithm
from commrt.tools.commands.arguments import ShapeOptions
from commrt.tools.planning.bounds import ring_count

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
        values.setdefault("count", min(ring_count(cluster), per_node))
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
