# SPDX-License-Identifier: Apache-2.0
"""``commrt verify``: the proof of a schedule, as text or JSON. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import cast

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.catalogue import by_name
from commrt.algorithms.gossip import Gossip, Topology
from commrt.algorithms.torus import Torus2D
from commrt.cli.outputs import json_of
from commrt.collective import all_reduce
from commrt.errors import UsageError
from commrt.proving.mixing import Mixing, meetings, mixing, promise
from commrt.proving.proof import Proof, verify
from commrt.schedule import Algorithm

__all__ = ["choose", "run"]


def choose(
    name: str,
    grid: str | None,
    both_ways: bool,
    topology: str | None = None,
    within: int | None = None,
    backups: int | None = None,
) -> Algorithm:
    """The algorithm that the options describe; raises `UsageError` if they do not fit together."""
    algorithm = by_name(name)
    for_torus, for_gossip = grid is not None or both_ways, topology is not None or within is not None
    if for_torus and not isinstance(algorithm, Torus2D):
        raise UsageError(f"--grid and --both-ways are for torus2d, not for {name}: leave them out")
    if for_gossip and not isinstance(algorithm, Gossip):
        raise UsageError(f"--topology and --within are for gossip, not for {name}: leave them out")
    if backups is not None and not isinstance(algorithm, BackupWorkers):
        raise UsageError(f"--backups is for backup, not for {name}: leave it out")
    if backups is not None:
        return BackupWorkers(backups)
    if for_torus:
        return Torus2D(_grid(grid) if grid else None, both_ways)
    if for_gossip:
        chosen = cast("Topology", topology or "dissemination")  # checked where it arrives
        return Gossip(chosen, within=1 if within is None else within)
    return algorithm


def run(algorithm: Algorithm, ranks: int, show: bool, as_json: bool) -> bool:
    """Verify the schedule of `algorithm` on `ranks` ranks, print the outcome, return whether it holds."""
    if isinstance(algorithm, Gossip):
        return _run_gossip(algorithm, ranks, show, as_json)
    schedule = algorithm.schedule(0, ranks)
    members = range(algorithm.needed(ranks)) if isinstance(algorithm, BackupWorkers) else None
    proof = verify(schedule, all_reduce(ranks, schedule.chunks, members))
    if as_json:
        print(json_of(_record(proof, algorithm)))
        return proof.ok
    if show:
        print(schedule)
    print(_sentence(proof))
    return proof.ok


PERIODS = 2
"""As it begins, and after partners have changed places."""
MOST_MEETINGS = 100_000
"""Steps."""


def _run_gossip(algorithm: Gossip, ranks: int, show: bool, as_json: bool) -> bool:
    """Two periods step by step, and what a period does as a whole."""
    schedules = [algorithm.schedule(step, ranks) for step in range(PERIODS * algorithm.period(ranks))]
    proofs = [verify(schedule, promise(algorithm, schedule)) for schedule in schedules]
    worst = next((proof for proof in proofs if not proof.ok), proofs[0])
    report = mixing(schedules[: algorithm.period(ranks)], algorithm.within)
    one_each = replace(algorithm, within=1)  # a row's message is of all its ranks
    met = meetings(one_each, ranks // algorithm.within, MOST_MEETINGS) if algorithm.rotate else None
    if as_json:
        period = {"period": algorithm.period(ranks), "met_all_after": met}
        print(json_of(_record(worst, algorithm) | period | asdict(report)))
        return worst.ok
    if show:
        print(*schedules, sep="\n")
    print(_sentence(worst))
    if worst.ok:
        who = "ranks" if algorithm.within == 1 else f"rows of {algorithm.within}"
        print(_period(report, algorithm.period(ranks), who, met))
    return worst.ok


def _period(report: Mixing, steps: int, who: str, met: int | None) -> str:
    """What becomes of differences, and who hears of whom."""
    exact = report.smallest == report.largest == 1
    holds = "exactly the mean" if exact else f"{report.smallest:.3g} to {report.largest:.3g} times its share of each"
    meet = "never meet all others directly" if met is None else f"have met all others directly after {met} steps"
    return (
        f"after {steps} step{'s' * (steps != 1)} every rank holds {holds}; {report.second_singular_value:.3g} of the "
        f"differences between ranks is left at most; {who} {meet}"
    )


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
