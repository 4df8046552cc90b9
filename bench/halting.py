# SPDX-License-Identifier: Apache-2.0
"""Stop upon stop: ``python bench/halting.py`` stops one rank at random instants, for up to three deadlines each time.

All ranks make calls of all meanwhile, which have parts, and, with ``--steps``, so many steps before each. Those that
are never stopped must come through each call; the one that is may find that a call is over. Who came through has what
the others have, of the same call. Rank 0 is never stopped: it holds the store. With ``--dies``, another rank is killed
at a random instant, and there are two backups.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from random import Random
from threading import Event, Thread
from typing import Any

import torch
from torch import nn

import commrt
from commrt.testing.processes import Outcome, run_processes

__all__ = ["Loop", "Watch", "keep"]

LONGEST = 3.25
"""A stop, in deadlines."""
PAUSE_S = 0.3
"""At most, between two calls of a rank."""
BEHIND = "behind"


@dataclass(frozen=True)
class Loop:
    """What each process does."""

    rounds: int = 30
    """Calls of all."""
    steps: int = 0
    """Before each of them."""
    width: int = 2000
    timeout_s: float = 2.0


@dataclass(frozen=True)
class Watch:
    """What a run showed."""

    calls: int
    missed: int
    """By the rank that was stopped."""
    wrong: tuple[str, ...]


def work(tell: Callable[[Any], None], loop: Loop, backups: int, seed: int) -> list[Any]:
    """One process; what each call gave."""
    torch.set_num_threads(1)
    with commrt.init(loop.timeout_s, start_timeout_s=60.0) as world:
        model = nn.Sequential(nn.Linear(loop.width, loop.width), nn.BatchNorm1d(loop.width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(backups))
        _step(model, optimizer, loop.width)
        tell("began")
        found, rng = list[Any](), Random(f"{seed} {world.rank}")
        for number in range(loop.rounds):
            for _ in range(loop.steps):
                _step(model, optimizer, loop.width)
            Event().wait(rng.uniform(0.0, PAUSE_S))
            try:
                found.append(_call(world, replica, number))
            except commrt.LeftBehind:
                found.append(BEHIND)
        return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    (model(torch.randn(4, width)).square().mean() / width).backward()
    optimizer.step()


def _call(world: commrt.World, replica: commrt.Replica, number: int) -> Any:
    match number % 3:
        case 0:
            return replica.consolidate()
        case 1:
            return replica.disagreement()
        case _:
            total = torch.zeros(world.size + 1)
            total[world.rank], total[-1] = 1.0, number
            world.all_reduce(total, "sum")
            return total.tolist()


def keep(ranks: int, stops: int, seed: int, loop: Loop, *, dies: bool = False) -> Watch:
    """One run."""
    rng, end = Random(seed), Event()
    victim = rng.randrange(1, ranks)
    instants = list(_stops(rng, stops, loop.timeout_s))
    dead = rng.choice([rank for rank in range(1, ranks) if rank != victim]) if dies else None
    death_s = rng.uniform(0.0, stops * LONGEST * loop.timeout_s / 2)

    def on_message(rank: int, _: Any, process: BaseProcess) -> None:
        if rank == victim and process.pid is not None:
            Thread(target=_halt, args=(process.pid, instants, end), daemon=True).start()
        if rank == dead:
            Thread(target=_kill, args=(process, death_s, end), daemon=True).start()

    limit_s = 60.0 + loop.rounds * (PAUSE_S + 1.0 + loop.steps) + stops * (LONGEST + 6.0) * loop.timeout_s
    ends = run_processes(ranks, work, loop, 1 + dies, seed, limit_s=limit_s, on_message=on_message)
    end.set()
    living = [each for each in ends if each.rank != dead]
    through = [each.value for each in living if each.rank != victim and each.value is not None]
    missed = sum((each.value or []).count(BEHIND) for each in living if each.rank == victim)
    return Watch(len(through) * loop.rounds, missed, tuple(_wrong(living, victim, loop.rounds)))


def _stops(rng: Random, stops: int, timeout_s: float) -> Iterator[tuple[float, float]]:
    """How long it runs before, and is stopped."""
    for _ in range(stops):
        yield rng.uniform(0.05, timeout_s), rng.uniform(0.05, LONGEST * timeout_s)


def _halt(pid: int, stops: list[tuple[float, float]], end: Event) -> None:
    with suppress(ProcessLookupError):
        for before_s, stopped_s in stops:
            if end.wait(before_s):
                return
            os.kill(pid, signal.SIGSTOP)
            end.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)


def _kill(process: BaseProcess, after_s: float, end: Event) -> None:
    if not end.wait(after_s):
        process.kill()


def _wrong(ends: list[Outcome], victim: int, rounds: int) -> Iterator[str]:
    yield from (f"rank {each.rank}: {each.error or each.exit_code}" for each in ends if each.value is None)
    found = {each.rank: each.value for each in ends if each.value is not None}
    for number in range(rounds):
        values = {rank: each[number] for rank, each in found.items()}
        through = {rank: value for rank, value in values.items() if value != BEHIND}
        missed = values.keys() - through.keys() - {victim}
        yield from (f"rank {rank} missed call {number}" for rank in missed)
        if len({str(value) for value in through.values()}) > 1:
            yield f"call {number} gave {through}"
        if number % 3 == 2 and len(found) == len(ends):
            members = {rank: float(rank in through) for rank in found}
            counted = (([v[rank] for rank in found], v) for v in through.values())
            yield from (f"call {number} of {members} gave {v}" for c, v in counted if c != [*members.values()])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--dies", action="store_true")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.runs):
        watch = keep(options.ranks, options.stops, seed, Loop(steps=options.steps), dies=options.dies)
        print(seed, watch, flush=True)


if __name__ == "__main__":
    main()
