# SPDX-License-Identifier: Apache-2.0
"""Kill and stop random ranks at random instants, and audit what the others did.

``python tests/audits/faults.py --runs 300``: each run trains a small network with 2 to 5 processes, with backup workers
or gossip, and calls collectives in between. Ranks get SIGKILL, or SIGSTOP for shorter or longer than the timeout, in
steps and in collectives. The command exits with 1 unless, in every run,

* no process hangs,
* every rank that was not killed, and not stopped for long, comes to the end,
* every rank that does not come to the end, and was not killed, ends with `Evicted`,
* with backup workers: the final weights are those of the reported gradients, each applied once (in float64, to 1e-12);
* all ranks that come to the end have the same weights, bit for bit, and saw the same results of each collective,
* a sum in which a rank is lost is the sum over all ranks, or over those that are left.
"""

import argparse
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from threading import Event, Thread
from time import perf_counter

import torch
from fault_cost import Trainee, drained, reference_holds

import commrt
from commrt.testing.processes import run_processes

ROUNDS, BATCHES = 9, 5
"""Collectives of a run, and batches of each rank before each."""
MOST_S = 0.06
"""A batch computes for so long at most."""
TIMEOUT_S = 2.0
SHORT, LONG = (0.05, 0.5), (1.6, 3.0)
"""How long a rank is stopped, in timeouts."""
SPAN_S = 3.0
"""Faults happen within so many seconds of the first step."""
LIMIT_S = 60.0


@dataclass(frozen=True)
class Fault:
    rank: int
    after_s: float
    stopped_s: float | None
    """None for SIGKILL."""

    @property
    def is_short(self):
        return self.stopped_s is not None and self.stopped_s < TIMEOUT_S

    def __str__(self):
        what = "kill" if self.stopped_s is None else f"stop {self.stopped_s:.2f} s"
        return f"rank {self.rank}: {what} after {self.after_s:.2f} s"


@dataclass(frozen=True)
class Case:
    seed: int
    ranks: int
    backups: int | None
    """None for gossip."""
    option: bool
    """Backup workers announce their first bucket (``early``); gossip mixes a step late."""
    faults: tuple[Fault, ...]

    @property
    def algorithm(self):
        if self.backups is None:
            return commrt.Gossip(staleness=int(self.option))
        return commrt.BackupWorkers(self.backups, early=self.option)


def cases(seeds):
    for seed in seeds:
        rng = Random(seed)
        ranks = rng.randint(2, 5)
        backups = None if ranks == 2 or rng.random() < 0.25 else (ranks - 1) // 2
        option = rng.random() < 0.3
        lost = rng.randint(0, ranks // 2 if backups is None else backups)  # the others must be half
        victims = rng.sample(range(ranks), ranks)
        faults = [_fault(rng, rank, is_lost=number < lost) for number, rank in enumerate(victims)]
        yield Case(seed, ranks, backups, option, tuple(fault for fault in faults if fault is not None))


def _fault(rng, rank, *, is_lost):
    after_s = rng.uniform(0.0, SPAN_S)
    if is_lost:
        return Fault(rank, after_s, None if rng.random() < 0.5 else rng.uniform(*LONG) * TIMEOUT_S)
    return Fault(rank, after_s, rng.uniform(*SHORT) * TIMEOUT_S) if rng.random() < 0.3 else None


def work(tell, case):
    """Train on one rank, and report which of its gradients counted."""
    torch.set_num_threads(1)
    with commrt.init(TIMEOUT_S, start_timeout_s=60.0) as world:
        trainee = Trainee(world, case.algorithm, case.seed)
        replica = trainee.replica
        tell("began")
        found: list[list[float]] = []
        for number in range(ROUNDS):
            for _ in range(BATCHES):
                drained(replica)
                trainee.step(MOST_S)
            found.append(_collective(world, replica, number))
        replica.consolidate()
        return trainee.report(found=found, equal=replica.replicas_equal())


def _collective(world, replica, number):
    match number % 3:
        case 0:
            total = torch.zeros(world.size + 1)
            total[world.rank], total[-1] = 1.0, number
            world.all_reduce(total, "sum")
            return total.tolist()
        case 1:
            replica.consolidate()
            return []
        case _:
            return [float(replica.replicas_equal())]


def run(case):
    over, processes = Event(), {}

    def on_message(rank, _, process):
        processes[rank] = process
        if len(processes) == case.ranks:
            for fault in case.faults:
                Thread(target=_strike, args=(processes[fault.rank], fault, over), daemon=True).start()

    try:
        return run_processes(case.ranks, work, case, limit_s=LIMIT_S, on_message=on_message, holds_store=True)
    finally:
        over.set()


def _strike(process, fault, over):
    if over.wait(fault.after_s) or process.pid is None:
        return
    with suppress(ProcessLookupError):
        if fault.stopped_s is None:
            os.kill(process.pid, signal.SIGKILL)
            return
        os.kill(process.pid, signal.SIGSTOP)
        over.wait(fault.stopped_s)
        os.kill(process.pid, signal.SIGCONT)


def wrong(case, ends):
    may_end = {fault.rank for fault in case.faults if not fault.is_short}
    for end in ends:
        was_killed = end.exit_code == -signal.SIGKILL and end.rank in may_end
        was_evicted = end.rank in may_end and (end.error or "").startswith("Evicted")
        if end.value is None and not was_killed and not was_evicted:
            yield f"rank {end.rank}: {end.error or f'exit code {end.exit_code}'}"
    alive = [end for end in ends if end.value is not None]
    if not alive:
        yield "no rank came to the end"
        return
    yield from _differences(alive)
    if case.backups is not None:
        try:
            reference_holds(alive, case.ranks - case.backups, least=0)
        except AssertionError as error:
            yield str(error)


def _differences(alive):
    first = alive[0].value
    for end in alive:
        if not end.value["equal"]:
            yield f"rank {end.rank} found that replicas differ"
        if any((a != b).any() for a, b in zip(first["params"], end.value["params"], strict=True)):
            yield f"rank {end.rank} has other weights than the first"
        if not all(_is_sum(total, number) for number, total in enumerate(end.value["found"]) if number % 3 == 0):
            yield f"rank {end.rank} has a sum that counts a rank in part or twice: {end.value['found']}"
        if end.value["found"] != first["found"]:
            yield f"rank {end.rank} saw {end.value['found']} in collectives, and the first {first['found']}"


def _is_sum(total, number):
    *ranks, numbers = total
    return {*ranks} <= {0.0, 1.0} and numbers == number * sum(ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    counts, begin_s = Counter[str](), perf_counter()
    for case in cases(range(options.seed, options.seed + options.runs)):
        run_begin_s = perf_counter()
        ends = run(case)
        complaints = list(wrong(case, ends))
        counts["runs"] += 1
        counts["wrong runs"] += bool(complaints)
        counts["killed"] += sum(fault.stopped_s is None for fault in case.faults)
        counts["stopped for long"] += sum(fault.stopped_s is not None and not fault.is_short for fault in case.faults)
        counts["stopped shortly"] += sum(fault.is_short for fault in case.faults)
        counts["evicted"] += sum((end.error or "").startswith("Evicted") for end in ends)
        counts["steps audited"] += max((len(end.value["used"]) for end in ends if end.value is not None), default=0)
        said = "; ".join(complaints) or "ok"
        faults = ", ".join(map(str, case.faults)) or "no fault"
        lasted_s = perf_counter() - run_begin_s
        print(f"{case.seed}: {case.ranks} ranks, {case.algorithm}, {faults}: {said} ({lasted_s:.1f} s)", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {perf_counter() - begin_s:.0f} s")
    sys.exit(bool(counts["wrong runs"]))


if __name__ == "__main__":
    main()
