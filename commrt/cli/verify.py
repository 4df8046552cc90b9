# SPDX-License-Identifier: Apache-2.0
"""``commrt verify``: the proof of a schedule, as text or JSON. Needs no torch."""

from __future__ import annotations

import json
import re

from commrt.algorithms.catalogue import by_name
from commrt.algorithms.torus import Torus2D
from commrt.collective import all_reduce
from commrt.errors import UsageError
from commrt.proof import Proof, verify
from commrt.schedule import Algorithm

__all__ = ["choose", "run"]


def choose(name: str, grid: str | None, both_ways: bool) -> Algorithm:
    """The algorithm that the options describe; raises `UsageError` if they do not fit together."""
    algorithm = by_name(name)
    if grid is None and not both_ways:
        return algorithm
    if not isinstance(algorithm, Torus2D):
        raise UsageError(f"--grid and --both-ways are for torus2d, not for {name}: leave them out")
    return Torus2D(_grid(grid) if grid else None, both_ways)


def run(algorithm: Algorithm, ranks: int, show: bool, as_json: bool) -> bool:
    """Verify the schedule of `algorithm` on `ranks` ranks, print the outcome, return whether it holds."""
    schedule = algorithm.schedule(0, ranks)
    proof = verify(schedule, all_reduce(ranks, schedule.chunks))
    if as_json:
        print(json.dumps(_record(proof, algorithm)))
        return proof.ok
    if show:
        print(schedule)
    print(_sentence(proof))
    return proof.ok


def _grid(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d+)x(\d+)", text)
    if sides is None:
        raise UsageError(f"--grid {text!r} is no grid: write it as 4x3, ranks in a row x ranks in a column")
    return int(sides[1]), int(sides[2])


def _record(proof: Proof, algorithm: Algorithm) -> dict[str, object]:
    return {
        "ok": proof.ok,
        "algorithm": repr(algorithm),
        "schedule": proof.schedule,
        "collective": proof.collective,
        "ranks": proof.ranks,
        "chunks": proof.chunks,
        "steps": proof.traffic.steps,
        "transfers": proof.traffic.transfers,
        "bytes_per_rank": float(proof.traffic.bytes_per_rank),
        "max_peers": proof.traffic.max_peers,
        "counterexample": None if proof.ok else str(proof.counterexample),
    }


def _sentence(proof: Proof) -> str:
    if not proof.ok:
        return f"{proof.schedule} is not a correct {proof.collective}: {proof.counterexample}"
    cost = proof.traffic
    return (
        f"{proof.schedule} on {proof.ranks} ranks is a correct {proof.collective}: {cost.steps} steps, "
        f"{cost.transfers} transfers, {float(cost.bytes_per_rank):.4g} of the buffer sent by the busiest rank, "
        f"at most {cost.max_peers} peers at once"
    )
