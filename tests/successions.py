# SPDX-License-Identifier: Apache-2.0
"""What each worker process of test_succession runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic

import torch

import commrt
from commrt.errors import PeerLost, Place
from commrt.replicas.company import Company
from commrt.runtime.executor import BoundProgram
from commrt.store.asking import another_connection

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from striking import backward, drained, network


def _backed(world, backups):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return commrt.attach(model, optimizer, commrt.BackupWorkers(backups), world=world, bucket_cap_mb=0.01), optimizer


def _step(replica, optimizer, rank, version, most_s=0.04):
    Event().wait(Random(f"{rank} {version}").uniform(0, most_s))
    backward(replica.model, rank, version)
    optimizer.step()


def epochs(tell, dies_at, timeout_s=8.0):
    """So many batches for each rank, then a call of all, so that ranks come to it from different steps; one dies."""
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        for epoch in range(3):
            for batch in range(12):
                replica.drain()
                if (world.rank, epoch, batch) == (2, 1, dies_at):
                    tell("kill")
                    Event().wait(60.0)
                _step(replica, optimizer, world.rank, replica.step)
            replica.replicas_equal()
        return world.members


def ends_early(tell, batches, timeout_s=2.0):
    """Rank 0, which holds the store, has few batches; the others take many times the deadline."""
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        for number in range(5 if world.rank == 0 else batches):
            replica.drain()
            _step(replica, optimizer, world.rank, number, most_s=0.2)
        return replica.step


def calls_at(tell, goals, timeout_s=8.0):
    """A call of all after so many updates; a successor makes those that come after the step it begins with."""
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        made, equal = replica.step if world.is_successor else 0, []
        for goal in (goal for goal in goals if goal > made):
            while (version := drained(replica).step) < goal:
                if world.rank == 2 and not world.is_successor and version >= goals[0] - 2:
                    tell("replace")
                    Event().wait(60.0)
                _step(replica, optimizer, world.rank, version)
            equal.append((goal, replica.replicas_equal()))
        return equal


def comes_amid_a_call(tell, timeout_s):
    """Rank 3 dies in a call of all, and its successor waits to be let in; then rank 2 is stopped, and rank 1 hears of
    a broken connection, so that they connect anew, and are too few until rank 2 comes back.

    How long that call took whoever was in it, and what each found in one after some steps.
    """
    welcome, run, found = Company._is_welcome, BoundProgram.run, []

    def asks(company):
        if not (is_welcome := welcome(company)):
            another_connection(company._world.store).set("a successor waits", "")
        return is_welcome

    def broken(program, *where):
        BoundProgram.run = run
        if world.rank == 2:
            store.set("stopped", "")
            tell("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if world.rank == 1:
            store.get("stopped")
            raise PeerLost("a connection broke", Place(1, 2))
        return run(program, *where)

    Company._is_welcome = asks
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        replica, optimizer = _backed(world, 1)
        store, sync_buffers = another_connection(world.store), replica.sync_buffers

        def slow():
            replica.sync_buffers = sync_buffers
            if world.rank == 3:
                tell("replace")
                Event().wait(60.0)
            store.get("a successor waits")
            BoundProgram.run = broken
            sync_buffers()

        if not world.is_successor:
            _step(replica, optimizer, world.rank, 0)
            replica.sync_buffers = slow
            begin_s = monotonic()
            replica.consolidate()
            found.append(monotonic() - begin_s)
        while replica.drain() or replica.step < 20:
            _step(replica, optimizer, world.rank, replica.step)
        return [*found, replica.replicas_equal()]
