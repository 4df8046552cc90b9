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
from commrt.runtime.summing import Summing


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
