# SPDX-License-Identifier: Apache-2.0
"""What each worker process of the tests runs in which ranks part in what all do together, and meet again."""

from __future__ import annotations

import os
import signal

import torch
from casualties import joined, model_of, one_step

import commrt
from commrt.errors import PeerLost, Place
from commrt.runtime.comparison import Comparison
from commrt.runtime.executor import BoundProgram
from commrt.runtime.summing import Summing
from commrt.store.asking import another_connection


def given_up_by_all(tell, timeout_s):
    """The last rank is busy until all others have given a call up; then it comes to that, while they train on.

    What each makes of that call, and of the next one.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    store, others = another_connection(world.store), range(world.size - 1)
    if world.rank not in others:
        for rank in others:
            store.get(f"gave up {rank}")
    try:
        found = replica.consolidate()
    except commrt.CommrtError as error:
        found = type(error).__name__
    store.set(f"gave up {world.rank}", "")
    while world.rank in others and not store.check([f"gave up {world.size - 1}"]):
        one_step(model, optimizer, world.rank, replica.step)
    last = replica.consolidate()
    world.close()
    return found, last


def refused_as_one_dies(tell):
    """All sum tensors of different sizes; rank 3 dies as it has learned that, and rank 1 does not learn it.

    What each makes of that, and of the next call.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), 4.0, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    gather = Comparison._gather

    def odd(comparison, *what):
        Comparison._gather = gather
        found = gather(comparison, *what)
        if world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerLost("the last message was lost", Place(1, 3)) if found else AssertionError

    if world.rank in (1, 3):
        Comparison._gather = odd
    try:
        found = world.all_reduce(torch.ones(64 * (1 + world.rank)), "sum")
    except commrt.CommrtError as error:
        found = type(error).__name__
    last = replica.replicas_equal()
    world.close()
    return found, last


def another_call_and_on(tell, timeout_s, trains):
    """Rank 1 makes another call than the others, once they are in theirs, and then the same ones; what each hears."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    store, run, heard = another_connection(world.store), BoundProgram.run, []

    def announced(*what):
        BoundProgram.run = run
        store.set(f"rank {world.rank} is amid it", "")
        run(*what)

    if world.rank == 1:
        store.get("rank 0 is amid it")
        store.get("rank 2 is amid it")
    else:
        BoundProgram.run = announced
    first = (lambda: world.all_reduce(torch.ones(2))) if world.rank == 1 else replica.consolidate
    for call in (first, replica.replicas_equal):
        try:
            heard.append(call())
        except commrt.CommrtError as error:
            heard.append(type(error).__name__)
        if trains:
            one_step(model, optimizer, world.rank, replica.step)
    replica.consolidate()
    world.close()
    return heard


def refused_by_one(tell, timeout_s):
    """An algorithm that rank 1 cannot use, as it finds when all sum with it; what each makes of that, and of the next.

    It has looked ahead, and seen nothing.
    """
    _, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    schedule, looks, heard = Summing._schedule, [], []

    def odd(*what):
        looks.append(what)
        if len(looks) == 2:
            raise commrt.UsageError("no schedule of so many ranks")
        return schedule(*what)

    if world.rank == 1:
        Summing._schedule = odd
    for _ in range(2):
        try:
            heard.append(world.all_reduce(torch.ones(2), "sum").is_completed())
        except commrt.CommrtError as error:
            heard.append(type(error).__name__)
    world.close()
    return heard
