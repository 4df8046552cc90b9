# SPDX-License-Identifier: Apache-2.0
"""``commrt verify``: prove schedules of an algorithm or a collective, and print their cost.

Of gossip it also prints what a period mixes. Nothing runs, and no torch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Annotated, Any

import typer

from commrt.algorithm import Algorithm
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, ROOTED, candidates
from commrt.algorithms.gossip import Gossip
from commrt.backup_workers.policy import BackupWorkers
from commrt.errors import UsageError
from commrt.nccl_groups import group_count, nccl_groups
from commrt.pricing.forced import require_candidate
from commrt.proof import order_of_additions, replay
from commrt.proof.additions import Additions
from commrt.proof.replay import Proof
from commrt.proof.spec import Collective, all_reduce, collective_of, promise
from commrt.schedule import MIX, Schedule
from commrt.tools.commands.arguments import CollectiveOptions, Json, ShapeOptions, leave_out
from commrt.tools.commands.choosing import choose
from commrt.tools.commands.output import json_of
from commrt.tools.planning.mixing import mixing, steps_to_meet_all

PERIODS = 2
"""Periods of gossip that are verified: before and after the partners change."""
MOST_STEPS_TO_MEET = 100_000
MOST_RANKS_IN_ORDER = 256
"""Up to so many, it takes under a second to find in which order a schedule adds."""


def verify(
    algorithm: Annotated[
        str,
        typer.Argument(
            help=(
                f"{', '.join(ALGORITHMS)}, gossip, local or backup. Or a collective:"
                f" {', '.join(COLLECTIVES)}."
            )
        ),
    ],
    of_collective: CollectiveOptions,
    shape: ShapeOptions,
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Number of ranks.")] = 4,
    backups: Annotated[
        int | None, typer.Option(min=0, help="For backup: how many ranks a step does not wait for.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the schedule, step by step.")] = False,
    as_json: Json = False,
) -> None:
    """Prove a schedule, and print its cost.

    The exit code is 1 if the schedule is wrong.
    """
    schedule, root = of_collective
    if algorithm in COLLECTIVES:
        leave_out(
            "a collective takes --schedule and --root", shape.given() | {"--backups": backups}
        )
        ok = _verify_collective(algorithm, schedule, ranks, root, show, as_json)
    else:
        leave_out(f"{algorithm} is no collective", {"--schedule": schedule, "--root": root})
        ok = _verify_algorithm(choose(algorithm, shape, backups=backups), ranks, show, as_json)
    if not ok:
        raise typer.Exit(1)


def _verify_algorithm(algorithm: Algorithm, ranks: int, show: bool, as_json: bool) -> bool:
    """Verify and print `algorithm`'s schedule on `ranks` ranks; return True if it is correct.

    For gossip, verify each step of two periods, and print what a period does as a whole.
    """
    steps = PERIODS * algorithm.period(ranks) if isinstance(algorithm, Gossip) else 1
    schedules = [algorithm.schedule(step, ranks) for step in range(steps)]
    proofs = [replay.verify(schedule, _spec(algorithm, schedule)) for schedule in schedules]
    worst = next((proof for proof in proofs if not proof.ok), proofs[0])
    mixed = (
        _mixing(algorithm, schedules[: steps // PERIODS]) if isinstance(algorithm, Gossip) else {}
    )
    if as_json:
        shown = {"shown": [str(each) for each in schedules]} if show else {}
        record = (
            {"algorithm": repr(algorithm)} | _record(worst, schedules[proofs.index(worst)]) | mixed
        )
        print(json_of(record | shown))
        return worst.ok
    if show:
        print(*schedules, sep="\n")
    print(_words(worst, schedules[proofs.index(worst)]))
    if isinstance(algorithm, Gossip) and worst.ok:
        print(_mixing_sentence(mixed, algorithm.within))
    return worst.ok


def _verify_collective(
    collective: str, name: str | None, ranks: int, root: int | None, show: bool, as_json: bool
) -> bool:
    """Verify the schedule of `collective` called `name`, or all of them, likewise."""
    if root is not None and collective not in ROOTED:
        raise UsageError(f"{collective} has no root: leave --root out")
    root = root or 0
    offered = candidates(collective, ranks, root)
    schedules = (
        offered if name is None else {name: require_candidate(collective, name, ranks, root)}
    )
    proofs = {
        each: replay.verify(schedule, collective_of(collective, ranks, schedule.chunks, root))
        for each, schedule in schedules.items()
    }
    ok = all(proof.ok for proof in proofs.values())
    if as_json:
        records = {
            each: (
                _record(proof, schedules[each]) | ({"shown": str(schedules[each])} if show else {})
            )
            for each, proof in proofs.items()
        }
        print(json_of({"ok": ok, "schedules": records}))
        return ok
    if show:
        print(*schedules.values(), sep="\n")
    print(*map(_words, proofs.values(), schedules.values()), sep="\n")
    return ok


def _spec(algorithm: Algorithm, schedule: Schedule) -> Collective:
    if isinstance(algorithm, BackupWorkers):
        return all_reduce(schedule.ranks, schedule.chunks, range(algorithm.needed(schedule.ranks)))
    return promise(algorithm, schedule)


def _mixing(algorithm: Gossip, period: Sequence[Schedule]) -> dict[str, Any]:
    """Return what a `period` does as a whole, and the steps until each rank has met all others."""
    met = None
    if algorithm.rotate:
        of_rows = replace(algorithm, within=1)  # a row acts as one rank
        met = steps_to_meet_all(of_rows, period[0].ranks // algorithm.within, MOST_STEPS_TO_MEET)
    return {"period": len(period), "met_all_after": met} | asdict(mixing(period, algorithm.within))


def _mixing_sentence(mixed: dict[str, Any], within: int) -> str:
    shares = (mixed["smallest"], mixed["largest"])
    period = mixed["period"]
    met = mixed["met_all_after"]
    share = (
        "exactly the mean"
        if shares == (1, 1)
        else "{:.3g} to {:.3g} times its share of each".format(*shares)
    )
    who = "ranks" if within == 1 else f"rows of {within}"
    meet = (
        "never meet all others directly"
        if met is None
        else f"have met all others directly after {met} steps"
    )
    return (
        f"after {period} step{'s' * (period != 1)} every rank holds {share};"
        f" {mixed['second_singular_value']:.3g} of the differences between ranks is left at most;"
        f" {who} {meet}"
    )


def _additions(schedule: Schedule) -> Additions | None:
    """Return in which order `schedule` adds; None if it mixes, or has too many ranks for it."""
    if schedule.ranks > MOST_RANKS_IN_ORDER or any(
        (step.combine == MIX).any() for step in schedule.steps()
    ):
        return None
    return order_of_additions(schedule)


def _nccl_groups(schedule: Schedule) -> int:
    """Return in how many NCCL groups all steps are sent, if messages are large."""
    steps = (step.canonical() for step in schedule.steps())
    return sum(group_count(nccl_groups(step, schedule.ranks), inf) for step in steps if len(step))


def _record(proof: Proof, schedule: Schedule) -> dict[str, object]:
    added = _additions(schedule) if proof.ok else None
    facts = asdict(proof)
    return {
        "ok": proof.ok,
        **{name: facts[name] for name in ("schedule", "collective", "ranks", "chunks")},
        **facts["traffic"],
        "bytes_per_rank": float(proof.traffic.bytes_per_rank),
        "nccl_groups": _nccl_groups(schedule),
        "orders_of_addition": None if added is None else added.orders,
        "counterexample": None if proof.ok else str(proof.counterexample),
    }


def _words(proof: Proof, schedule: Schedule) -> str:
    if not proof.ok:
        return f"{proof.schedule} is not a correct {proof.collective}: {proof.counterexample}"
    added = _additions(schedule)
    groups = _nccl_groups(schedule)
    lines = [f"  over NCCL {groups} group{'s' * (groups != 1)}, none so large that NCCL cuts it"]
    lines += [f"  adds in {added}"] if added is not None and added.orders else []
    return "\n".join([_sentence(proof), *lines])


def _sentence(proof: Proof) -> str:
    cost = proof.traffic
    return (
        f"{proof.schedule} on {proof.ranks} ranks is a correct {proof.collective}: {cost.steps}"
        f" steps, {cost.transfers} transfers, {float(cost.bytes_per_rank):.4g} of the buffer sent"
        f" by the busiest rank, at most {cost.max_peers} peers at once"
    )
