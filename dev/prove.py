# SPDX-License-Identifier: Apache-2.0
"""Prove all schedules of the catalogue for 1 to 64 ranks, and some for more: ``make prove``.

Each line of the output is one sweep: how many checks it made, on how many ranks, and its seconds.
The program ends with exit code 1 if any check fails, and says which: algorithm, ranks, root, and
the counter-example.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
from combining_races import TwoStreams, races, run_noted

from commrt.algorithms import tree
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, REGISTERED, ROOTED, candidates
from commrt.algorithms.direct import Direct
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.registration import Registration, is_power_of_two, twice_all_but_one
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.sliced import Sliced, in_slices
from commrt.algorithms.torus import Torus2D
from commrt.backup_workers.policy import BackupWorkers
from commrt.nccl_groups import MOST_MESSAGES, nccl_groups
from commrt.proof import spec
from commrt.proof.replay import Proof, Traffic, verify
from commrt.proof.symbols import different
from commrt.schedule import Schedule, Step
from commrt.tools.planning.mixing import mixing, steps_to_meet_all

FEW = [*range(1, 10), 12, 13, 16, 17, 31, 32, 33, 64]
"""Rank counts of `--few`."""
ALL = [*range(1, 65), 97, 128]
MOST_TO_MEET = 100_000

COSTS = {(each.collective, each.name): each for each in REGISTERED}

Check = tuple[str, str | None]
"""What was checked, and what is wrong with it, or None."""


class Sweep(NamedTuple):
    """Checks of one kind, for each of `ranks`."""

    ranks: Sequence[int]
    checks: Callable[[int], Iterator[Check]]


def named(what: str, proof: Proof, cost: str | None = None) -> Check:
    """Return the check of a proof, and of a cost that is right if it is None."""
    found = proof.counterexample
    return f"{what} ({proof.schedule}, {proof.ranks} ranks)", cost if found is None else str(found)


def summed(
    what: str, schedule: Schedule, steps: int | None = None, sent: Fraction | None = None
) -> Check:
    """Prove an all-reduce, and that it takes so many steps and sends so many buffers per rank, if
    they are given.
    """
    proof = verify(schedule, spec.all_reduce(schedule.ranks, schedule.chunks))
    found = (proof.traffic.steps, proof.traffic.bytes_per_rank)
    wanted = (steps, sent)
    is_right = all(want in {None, has} for has, want in zip(found, wanted, strict=True))
    return named(
        what, proof, None if is_right else f"takes {found} instead of {wanted} steps and buffers"
    )


def wrong_cost(registered: Registration, ranks: int, found: Traffic) -> str | None:
    """Return in words how the cost of a schedule differs from the registered one, or None."""
    steps = registered.steps(ranks) if ranks > 1 else 0
    sent = registered.sent(ranks) if ranks > 1 else 0
    has = found.bytes_per_rank
    is_right = has <= sent if registered.is_limit else has == sent
    if found.steps == steps and is_right:
        return None
    return f"takes {found.steps} steps and {has} buffers instead of {steps} and {sent}"


def divisors(ranks: int) -> list[int]:
    """Return all divisors, the smallest first."""
    return [x for x in range(1, ranks + 1) if ranks % x == 0]


def of_algorithm(name: str, ranks: int) -> Iterator[Check]:
    """Prove an all-reduce of the catalogue, at its closed form."""
    yield registered(name, name, ALGORITHMS[name]().schedule(0, ranks))


def registered(name: str, what: str, schedule: Schedule) -> Check:
    """Prove an all-reduce, at the closed form of the registered `name`."""
    proof = verify(schedule, spec.all_reduce(schedule.ranks, schedule.chunks))
    return named(what, proof, wrong_cost(COSTS["all_reduce", name], proof.ranks, proof.traffic))


def both_ways(ranks: int) -> Iterator[Check]:
    """Prove the torus whose halves go different ways, and, on a few ranks, on every grid."""
    yield registered("torus2d", "torus2d, both ways", Torus2D(both_ways=True).schedule(0, ranks))
    for x in divisors(ranks) if ranks <= 33 else []:
        schedule = Torus2D((x, ranks // x), both_ways=True).schedule(0, ranks)
        yield summed(
            "torus2d, both ways", schedule, 2 * (x + ranks // x - 2), twice_all_but_one(ranks)
        )


def grids(ranks: int) -> Iterator[Check]:
    """Prove the torus on every grid, at its closed form."""
    for x in divisors(ranks):
        schedule = Torus2D((x, ranks // x)).schedule(0, ranks)
        yield summed("torus2d", schedule, 2 * (x + ranks // x - 2), twice_all_but_one(ranks))


def within_hosts(ranks: int) -> Iterator[Check]:
    """Prove all-reduces that know hosts, for all sizes of hosts."""
    for within in divisors(ranks):
        steps = 2 * (ranks > 1) if within in {1, ranks} else 4
        yield summed("direct", Direct(within).schedule(0, ranks), steps, twice_all_but_one(ranks))
        if within > 1:
            yield summed("direct, ring", Direct(within, between=Ring()).schedule(0, ranks))
        if ranks <= 33:
            yield summed(
                "rings", Rings(within, within).schedule(0, ranks), sent=twice_all_but_one(ranks)
            )
            yield summed("double_tree", DoubleTree(within, slices=3).schedule(0, ranks))


def backups(ranks: int) -> Iterator[Check]:
    """Prove that backup workers sum over those whose gradients count."""
    for spare in range((ranks + 1) // 2)[:4]:
        algorithm = BackupWorkers(spare)
        schedule = algorithm.schedule(0, ranks)
        promise = spec.all_reduce(ranks, schedule.chunks, range(algorithm.needed(ranks)))
        yield named(f"{spare} backups", verify(schedule, promise))


def sliced(ranks: int) -> Iterator[Check]:
    """Prove that slices of an all-reduce are an all-reduce."""
    for name, build in ALGORITHMS.items():
        yield summed(name, Sliced(build(), 3).schedule(0, ranks))


def roots(collective: str, ranks: int) -> list[int]:
    """Return one root of each kind: the first, the second, one in the middle, the last; of many
    ranks, one for all.
    """
    if collective not in ROOTED:
        return [0]
    return sorted({0, 1 % ranks, ranks // 2, ranks - 1}) if ranks <= 33 else [ranks // 2]


def of_collective(collective: str, ranks: int) -> Iterator[Check]:
    """Prove all schedules of a collective from each kind of root, at their closed forms."""
    for root in roots(collective, ranks):
        for name, schedule in candidates(collective, ranks, root).items():
            proof = verify(schedule, spec.collective_of(collective, ranks, schedule.chunks, root))
            cost = wrong_cost(COSTS[collective, name], ranks, proof.traffic)
            yield named(f"{collective} {name} from root {root}", proof, cost)


def in_parts(ranks: int) -> Iterator[Check]:
    """Prove the halves of an all-reduce, and on a few ranks all collectives, with three chunks in
    each piece.
    """
    some = COLLECTIVES if ranks in {2, 3, 5, 8} else ("reduce_scatter", "all_gather")
    for collective in some:
        for name, schedule in candidates(collective, ranks).items():
            fine = schedule.refined(3)
            proof = verify(fine, spec.collective_of(collective, ranks, fine.chunks))
            yield named(f"{collective} {name}, refined", proof)


def every_root(ranks: int) -> Iterator[Check]:
    """Prove trees from every root."""
    for root in range(ranks):
        for build in (tree.broadcast, tree.reduce, tree.scatter, tree.gather):
            schedule = build(ranks, root)
            promise = spec.collective_of(build.__name__, ranks, schedule.chunks, root)
            yield named(f"{build.__name__} tree from root {root}", verify(schedule, promise))


def gossip(ranks: int) -> Iterator[Check]:
    """Prove the steps of two periods, that a period mixes, and that all ranks meet."""
    algorithm = Gossip()
    period = algorithm.period(ranks)
    for step in (*range(period), *range(3 * period, 4 * period)):
        schedule = algorithm.schedule(step, ranks)
        yield named(f"gossip, step {step}", verify(schedule, spec.promise(algorithm, schedule)))
    report = mixing(algorithm.schedule(step, ranks) for step in range(period))
    mixes = report.smallest > 0 and (report.smallest == report.largest == 1.0) == is_power_of_two(
        ranks
    )
    yield f"gossip, a period of {ranks} ranks", None if mixes else f"mixes to {report}"
    met = steps_to_meet_all(algorithm, ranks, MOST_TO_MEET)
    meets = met is not None and met >= ranks - 1
    yield f"gossip, {ranks} ranks", None if meets else f"all ranks have met after {met} steps"


def overlapping(ranks: int) -> Iterator[Check]:
    """Look for bytes that an exchange and a combination beside it touch in no order."""
    for inner in (Ring(), ALGORITHMS["halving_doubling"](), Torus2D(), Torus2D(both_ways=True)):
        for slices in (1, 2, 3, 4):
            schedule = in_slices(inner.schedule(0, ranks), slices)
            for rank in range(ranks):
                run_noted(schedule, rank, streams := TwoStreams())
                found = races(streams) if streams.accesses else "nothing was noted"
                yield (
                    f"bytes of {schedule.name}, rank {rank} of {ranks}",
                    (f"{found[:3]}" if found else None),
                )


def groups_of_nccl(ranks: int) -> Iterator[Check]:
    """Check that no rank has more messages in an NCCL group than one kernel takes; a distance
    counts once.
    """
    # it has ranks^2 chunks
    for collective in COLLECTIVES.keys() - ({"all_to_all"} if ranks > 128 else set()):
        for name, schedule in candidates(collective, ranks).items():
            # most come again
            steps = {step.src.tobytes() + step.dst.tobytes(): step for step in schedule.steps()}
            most = max(
                (most_messages(step.canonical(), ranks) for step in steps.values()), default=0
            )
            yield (
                f"{collective} {name}",
                (None if most <= MOST_MESSAGES else f"has {most} messages in a group"),
            )


def most_messages(step: Step, ranks: int) -> int:
    """Return the most messages of a rank in a group, or its distances if there are fewer."""
    groups = nccl_groups(step, ranks)
    group = np.zeros(len(step), int) if groups is None else groups
    distance = (step.dst - step.src) % ranks
    ends = np.concatenate((step.src, step.dst)) * (group.max(initial=0) + 1) + np.tile(group, 2)
    works = (
        different(ends * ranks + np.tile(distance, 2)) // ranks if is_uniform(step, ranks) else ends
    )
    return int(np.bincount(works).max(initial=0))


def is_uniform(step: Step, ranks: int) -> bool:
    """Return True if all ranks send and receive over the same distances, over each once."""
    counts = np.bincount((step.dst - step.src) % ranks)
    return bool(np.isin(counts, (0, ranks)).all())


SWEEPS: dict[str, Sweep] = {
    **{name: Sweep(range(1, 65), partial(of_collective, name)) for name in COLLECTIVES},
    "all_reduce": Sweep([*ALL, 256], partial(of_collective, "all_reduce")),
    **{
        name: Sweep(ALL, partial(of_algorithm, name))
        for name in ALGORITHMS
        if name not in COLLECTIVES["all_reduce"]
    },
    "torus2d, large": Sweep([256, 1024], partial(of_algorithm, "torus2d")),
    "torus2d, both ways": Sweep(ALL, both_ways),
    "torus2d, every grid": Sweep(range(1, 65), grids),
    "within hosts": Sweep(range(1, 65), within_hosts),
    "backup workers": Sweep(ALL, backups),
    "slices": Sweep(range(1, 18), sliced),
    "pieces of three chunks": Sweep(range(1, 34), in_parts),
    "trees, every root": Sweep(range(1, 18), every_root),
    "gossip": Sweep([*range(1, 65), 128], gossip),
    "NCCL groups": Sweep([*range(1, 65), 100, 128, 300, 1024], groups_of_nccl),
    "combining beside exchanges": Sweep(range(2, 9), overlapping),
}
"""All that is proven, by name."""


def wrong(name: str, ranks: Sequence[int] | None = None) -> tuple[int, list[str]]:
    """Make the checks of a sweep, on those of its ranks that are in `ranks`; return how many, and
    what is wrong.
    """
    count = 0
    found = []
    for each in SWEEPS[name].ranks:
        for what, is_wrong in SWEEPS[name].checks(each) if ranks is None or each in ranks else ():
            count += 1
            if is_wrong is not None:
                found.append(f"{what}: {is_wrong}")
    return count, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make all checks, or those that are asked for, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="make the sweeps whose names contain this")
    parser.add_argument(
        "--few", action="store_true", help=f"only for {', '.join(map(str, FEW))} ranks"
    )
    options = parser.parse_args(arguments)
    chosen = [name for name in SWEEPS if options.only in name]
    if not chosen:
        parser.error(f"no sweep is called {options.only!r}: choose one of {'; '.join(SWEEPS)}")
    begin_s = perf_counter()
    total = 0
    failed = list[str]()
    for name in chosen:
        start_s = perf_counter()
        count, found = wrong(name, FEW if options.few else None)
        total = total + count
        failed = failed + found
        told = f"{len(found)} WRONG" if found else "right"
        print(f"{name:40}{count:6,} checks{perf_counter() - start_s:7.1f} s  {told}", flush=True)
    print(*failed, sep="\n", end="\n" * bool(failed))
    print(f"{len(failed):,} of {total:,} checks failed, {perf_counter() - begin_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
