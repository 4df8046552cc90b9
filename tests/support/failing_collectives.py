# SPDX-License-Identifier: Apache-2.0
"""Worker processes of tests in which a rank is late, stopped, killed or replaced in a collective of all ranks."""

import os
import signal
from math import inf
from threading import Event
from time import monotonic

import torch
from failing_ranks import joined, model_of, one_step

import commrt
from commrt.runtime.executor import BoundProgram
from commrt.runtime.init import _at_exit
from commrt.store import client
from commrt.store.client import call_store, clone_connection
from commrt.training.tensor_bytes import fingerprint


def missing_a_call(tell, victim, timeout_s):
    """Three sums; `victim` is stopped before the second until the others have made it."""
    _, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)

    def summed(number):
        world.all_reduce(total := torch.tensor([1.0, number]), "sum")
        return total.tolist()

    first = summed(0)
    if world.rank == victim:
        world.store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    found = summed(1)
    if world.rank == min({*range(world.size)} - {victim}):
        os.kill(int(world.store.get("stopped")), signal.SIGCONT)
    last = summed(2)
    world.close()
    return first, found, last


def die_after_the_next_exchange():
    run = BoundProgram.run

    def run_once(program, *where):
        run(program, *where)
        os.kill(os.getpid(), signal.SIGKILL)

    BoundProgram.run = run_once


def dying_in_a_sum(tell, algorithm, victim):
    """`victim` is killed when it has the sum, which others lack for that, or have as well."""
    _, optimizer, world = joined(algorithm, 4.0, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    world.all_reduce(total := torch.ones(64), "sum")  # they compare what they do, once
    if world.rank == victim:
        die_after_the_next_exchange()
    world.all_reduce(total.fill_(1), "sum")
    world.close()
    return total.unique().tolist()


def dying_in_a_disagreement(tell, victim):
    """All claim something else; `victim` is killed when it knows that."""
    _, optimizer, world = joined(commrt.BackupWorkers(1), 30.0, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    if world.rank == victim:
        die_after_the_next_exchange()
    begin_s = monotonic()
    try:
        world.agree("lunch", dish=f"number {world.rank}")
    except commrt.DisagreementError as error:
        said = str(error)
    waited_s = monotonic() - begin_s
    equal = world.all_equal("weights", "mark")
    world.close()
    return said, equal, waited_s


def stopped_while_it_asks(tell):
    """For longer than the limit; the answer comes a little after it woke."""

    def question():
        Event().wait(0.1)  # until it is waited for; too early, and this passes for no reason
        latest_s, looked_s = inf, monotonic()
        tell(os.getpid())
        while looked_s < latest_s:  # until it has been stopped
            latest_s = looked_s + 4.0
            Event().wait(0.01)
            looked_s = monotonic()
        Event().wait(0.2)
        return "an answer"

    client.ANSWER_S = 5.0
    return call_store(question)


def stopped_in_a_question(tell, victim, timeout_s):
    """While a step's question to the store is on its way, for longer than the store may take."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    vote = replica._exchange._votes
    connection = vote._connection

    class Stopping:
        def append(self, key, word):
            vote._connection = connection
            tell(os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
            Event().wait(0.5)  # those who look after it look first
            return connection.append(key, word)

    if world.rank == victim:
        vote._connection = Stopping()
    one_step(model, optimizer, world.rank, 1)
    if world.rank == victim:
        world.store.set("awake", "")
    clone_connection(world.store, 10.0).get("awake")
    replica.consolidate()
    equal = replica.replicas_equal()
    world.close()
    return equal


def late_beside_a_stopped_one(tell, timeout_s):
    """Let rank 0 be late while the rank whose state it would copy first is stopped; the others wait for rank 0."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    store = clone_connection(world.store, 10.0)
    if world.rank == 0:
        store.get("stopped")
    one_step(model, optimizer, world.rank, 0)
    if world.rank == 1:
        store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        one_step(model, optimizer, world.rank, 1)
        counted = replica.last.counted
        replica.consolidate()
        if world.rank == 2:
            os.kill(int(store.get("stopped")), signal.SIGCONT)
        last = replica.replicas_equal()
    finally:
        if world.rank == 1:  # it was evicted meanwhile
            store.set("told", "")
    if world.rank == 0:  # which holds the store
        store.wait(["told"])
    world.close()
    return counted, last


def ends_early(tell, batches, timeout_s=2.0):
    """Rank 0, which holds the store, has few batches; the others take many times the deadline."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    for number in range(5 if world.rank == 0 else batches):
        replica.drain()
        Event().wait(0.1)
        one_step(model, optimizer, world.rank, number)
    world.close()
    return replica.step


def leaves_in_the_middle(tell, how):
    """Ranks 1 and 2 of three leave after two steps, without having said that their data has ended."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), 20.0, model := model_of())
    for number in range(2 if world.rank else 100):
        replica.drain()
        one_step(model, optimizer, world.rank, number)
    if how == "exit":
        _at_exit()  # processes of a test end without it
    elif how == "detach":
        try:
            raise OSError("out of memory")
        finally:
            replica.detach()
    else:
        try:
            raise SystemExit(143)
        finally:
            world.close()


def ends_without_closing(tell):
    """Rank 2 is late in the last step, and copies weights from ranks whose programs have come to their end."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), 20.0, model := model_of())
    while replica.drain() or replica.step < 5:
        if world.rank == 2 and replica.step == 4:
            world.store.wait(["0 is through", "1 is through"])
        one_step(model, optimizer, world.rank, replica.step)
    world.store.set(f"{world.rank} is through", "")
    replica.drain()
    found = replica.step, fingerprint(model)
    _at_exit()  # processes of a test end without it
    return found


def trains_on(tell):
    """Rank 2 of three is gone before its step 3; the others train on for 5 s."""
    _, optimizer, world = joined(commrt.BackupWorkers(1), 15.0, model := model_of())
    for step in range(400):  # both that are left are needed, so they make as many
        if world.rank == 2 and step == 3:
            os._exit(3)
        Event().wait(0.01)  # computes
        one_step(model, optimizer, world.rank, step)
    world.close()
    return [(loss.rank, loss.why) for loss in world.lost]
