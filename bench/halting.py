# SPDX-License-Identifier: Apache-2.0
"""Stop upon stop: ``python bench/halting.py`` stops one rank at random instants, for up to three deadlines each time.

All ranks make calls of all meanwhile, which have parts, and, with ``--steps``, so many steps before each. Those that
are never stopped must come through each call; the one that is may find that a call is over. Who came through has what
the others have, of the same call. Rank 0 is never stopped: it holds the store.
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

__all__ = ["Watch", "keep"]

LONGEST = 3.25
"""A stop, in deadlines."""
PAUSE_S = 0.3
"""At most, between two calls of a rank."""
BEHIND = "behind"


@dataclass(frozen=True)
class Watch:
    """What a run showed."""

    calls: int
    missed: int
    """By the rank that was stopped."""
    wrong: tuple[str, ...]


def work(tell: Callable[[Any], None], rounds: int, steps: int, width: int, seed: int, timeout_s: float) -> list[Any]:
    """One process; what each call gave."""
    torch.set_num_threads(1)
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1))
        _step(model, optimizer, width)
        tell("began")
        found, rng = list[Any](), Random(f"{seed} {world.rank}")
        for number in range(rounds):
            for _ in range(steps):
                _step(model, optimizer, width)
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


def keep(
    ranks: int, stops: int, seed: int, rounds: int = 30, steps: int = 0, width: int = 2000, timeout_s: float = 2.0
) -> Watch:
    """One run."""
    rng, end = Random(seed), Event()
    victim = rng.randrange(1, ranks)

    def on_message(rank: int, _: Any, process: BaseProcess) -> None:
        if rank == victim and process.pid is not None:
            Thread(target=_halt, args=(process.pid, list(_stops(rng, stops, timeout_s)), end), daemon=True).start()

    limit_s = 60.0 + rounds * (PAUSE_S + 1.0 + steps) + stops * (LONGEST + 6.0) * timeout_s
    ends = run_processes(ranks, work, rounds, steps, width, seed, timeout_s, limit_s=limit_s, on_message=on_message)
    end.set()
    calls = [each.value for each in ends if each.rank != victim and each.value is not None]
    missed = (ends[victim].value or []).count(BEHIND)
    return Watch(len(calls) * rounds, missed, tuple(_wrong(ends, victim, rounds)))


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
            members = [float(rank in through) for rank in range(len(ends))]
            yield from (f"call {number} of {members} gave {v}" for v in through.values() if v[:-1] != members)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.runs):
        print(seed, keep(options.ranks, options.stops, seed, steps=options.steps), flush=True)


if __name__ == "__main__":
    main()
