# SPDX-License-Identifier: Apache-2.0
"""Kill ranks at random places of steps and replace each of them: ``python tests/audits/replacements.py``.

At any time at most as many ranks are missing as there are backups, counting replacements that still start. At the end
few or none of the first processes are left. The weights must be those of the same steps in one process, with the
gradients that counted in each step. Rank 0 is not killed: it holds the store.
"""

import argparse
from random import Random
from statistics import median
from typing import NamedTuple

import torch
from fault_cost import MOST_S, WHERE, Fault, FaultInjector, Trainee, drained, reference_holds, require_equal

import commrt
from commrt.testing.processes import RESTART, run_processes

FIRST, EVERY = 3, (2, 12)
"""The first step with a death, and the least and most steps of a process between two chances to die."""
MORE = 8
"""Steps after the last death."""


class Replacements(NamedTuple):
    deaths: int
    steps: int
    quorums: int
    """Number of different quorums."""
    attached_s: float
    """Median time until another process was admitted."""
    most_attached_s: float
    longest_s: float
    """The longest step of any rank."""


class RandomDeaths(FaultInjector):
    """Kills as many ranks at once as there are backups, up to a total."""

    def __init__(self, tell, world, backups, deaths, begin):
        self._store, self._backups, self._deaths = world.store, backups, deaths
        self._counts_as_gone = world.is_replacement
        rng = Random(f"{world.rank} {begin}")
        steps = _every(rng, max(begin, FIRST))
        faults = (Fault(world.rank, next(steps), rng.choice(WHERE), "replace") for _ in range(50))
        super().__init__(tell, [*faults] if world.rank else [])

    def applies(self, _):
        """Return False if this fault is left out; see `FaultInjector`."""
        if self._counts_as_gone:
            return False
        if self._store.add("gone", 1) <= self._backups and self._store.add("deaths", 1) <= self._deaths:
            return True
        self._store.add("gone", -1)
        return False

    def count_step(self):
        if self._counts_as_gone:
            self._counts_as_gone = False
            self._store.add("gone", -1)


def _every(rng, begin):
    while True:
        begin += rng.randint(*EVERY)
        yield begin


def work(tell, backups, deaths, timeout_s):
    torch.set_num_threads(1)
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        trainee = Trainee(world, commrt.BackupWorkers(backups))
        replica = trainee.replica
        deaths_at_random = RandomDeaths(tell, world, backups, deaths, replica.step)
        deaths_at_random.watch(replica)
        while drained(replica).step < _goal(world, deaths, replica.step):
            if trainee.step(MOST_S):
                tell((replica.last.step, replica.last.members))
            deaths_at_random.count_step()
        return trainee.report(equal=replica.replicas_equal())


def _goal(world, deaths, version):
    if not world.store.check(["goal"]) and world.store.add("deaths", 0) >= deaths and not world.store.add("gone", 0):
        world.store.compare_set("goal", "", str(version + MORE))
    return int(world.store.get("goal")) if world.store.check(["goal"]) else float("inf")


def train_with_deaths(ranks, backups, deaths, timeout_s=15.0):
    """Run once; raise if a step was lost or done twice, or a rank ended wrongly."""

    def on_message(_, message, process):
        if message == "replace":
            process.kill()
            return RESTART
        return None

    ends = run_processes(ranks, work, backups, deaths, timeout_s, limit_s=60.0 + 4.0 * deaths, on_message=on_message)
    require_equal(ends)
    for end in ends:
        end.value["used"] = dict(message for message in end.messages if message != "replace")
    reference_holds(ends, ranks - backups)
    used = {step: members for end in ends for step, members in end.value["used"].items()}
    attached_s = [end.value["attached_s"] for end in ends if end.value["attached_s"] is not None]
    dead = sum(end.messages.count("replace") for end in ends)
    longest_s = max(end.value["longest_s"] for end in ends)
    return Replacements(dead, len(used), len({*used.values()}), median(attached_s), max(attached_s), longest_s)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=6, help="number of ranks")
    parser.add_argument("--backups", type=int, default=2, help="backups of the algorithm")
    parser.add_argument("--deaths", type=int, default=40, help="ranks to kill in all")
    options = parser.parse_args()
    print(train_with_deaths(options.ranks, options.backups, options.deaths))


if __name__ == "__main__":
    main()
