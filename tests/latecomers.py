# SPDX-License-Identifier: Apache-2.0
"""What each worker process of the tests runs in which one is late or lost in what all ranks do together."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from math import inf
from threading import Event
from time import monotonic

import torch
from casualties import joined, model_of, one_step

import commrt
from commrt.algorithms import halving_doubling
from commrt.errors import Place, TransportError
from commrt.runtime.executor import BoundProgram
from commrt.store.asking import another_connection, ask


def missing_a_call(tell, victim, timeout_s, what, is_stopped):
    """Two sums, and between them another call, for which `victim` is stopped, or busy, until it is over elsewhere."""
    model = model_of()
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model)
    one_step(model, optimizer, world.rank, 0)

    def summed(number):
        world.all_reduce(total := torch.tensor([1.0, number]), "sum")
        return total.tolist()

    def between():
        try:
            return {"sum": lambda: summed(1), "consolidate": replica.consolidate, "equal": replica.replicas_equal}[
                what
            ]()
        except commrt.CommrtError as error:
            return str(error)

    first = summed(0)
    if world.rank == victim and is_stopped:
        world.store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif world.rank == victim:
        another_connection(world.store).get("over")  # its lane needs the world's own
    found = between()
    if world.rank == min({*range(world.size)} - {victim}):
        world.store.set("over", "")
        if is_stopped:
            os.kill(int(world.store.get("stopped")), signal.SIGCONT)
    last = summed(2)
    world.close()
    return first, found, last


def dying_in_a_sum(tell, algorithm, victim):
    """`victim` is killed when it has the sum, which others lack for that, or have as well."""
    _, optimizer, world = joined(algorithm, 4.0, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    run = BoundProgram.run

    def run_once(program, *where):
        run(program, *where)
        os.kill(os.getpid(), signal.SIGKILL)

    world.all_reduce(total := torch.ones(64), "sum")  # they compare what they do, once
    if world.rank == victim:
        BoundProgram.run = run_once
    world.all_reduce(total.fill_(1), "sum")
    world.close()
    return total.unique().tolist()


def dying_in_a_disagreement(tell, algorithm, victim, when):
    """All claim something else; `victim` is killed when it has done `when`, a method of an owner."""
    _, optimizer, world = joined(algorithm, 30.0, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    owner, name = when
    does = getattr(owner, name)

    def do_once(self, *args):
        does(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == victim:
        setattr(owner, name, do_once)
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
            latest_s = looked_s + 0.5
            Event().wait(0.01)
            looked_s = monotonic()
        Event().wait(0.2)
        return "an answer"

    return ask(question, 0.8)


def stopped_in_a_question(tell, victim, timeout_s):
    """While a step's question to the store is on its way, for longer than the store may take."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    clerk = replica._backing.ballot._clerk
    answer = clerk._answer

    def stopped(wish):
        clerk._answer = answer
        tell(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        Event().wait(0.5)  # those who look after it look first
        return answer(wish)

    if world.rank == victim:
        clerk._answer = stopped
    one_step(model, optimizer, world.rank, 1)
    if world.rank == victim:
        world.store.set("awake", "")
    another_connection(world.store).get("awake")
    replica.consolidate()
    equal = replica.replicas_equal()
    world.close()
    return equal


def back_amid_a_call(tell, victim, timeout_s, *, is_hasty=False, dies=None, trains=False):
    """`victim` is stopped, and the others consolidate; between two parts of that it comes back and does so too.

    Where it `is_hasty` it learns only that it is too late when it is a member again: the others said so just then.
    Then one of them `dies`. A rank that `trains` does a step after each call.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    sync_buffers, found = replica.sync_buffers, []

    def slow():
        if world.rank == 0:
            os.kill(int(world.store.get("stopped")), signal.SIGCONT)
        if world.rank != victim:
            another_connection(world.store).get("told")
        if world.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        sync_buffers()

    replica.sync_buffers = slow
    if world.rank == victim:
        if is_hasty:
            _look_only_as_a_member(world.survival)
        world.store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(2):
        try:
            found.append(replica.consolidate())
        except commrt.LeftBehind:
            found.append("left behind")
            another_connection(world.store).set("told", "")
        if trains:
            one_step(model, optimizer, world.rank, 1)
            found.append(replica.last.counted)
    found.append(replica.replicas_equal())
    world.close()
    return found


def _look_only_as_a_member(survival):
    require_next, is_amid = survival.calls.require_next, survival._is_amid_another_call
    survival.calls.require_next = lambda **how: survival.generation and require_next(**how)
    survival._is_amid_another_call = lambda: survival.generation and is_amid()


def slow_to_begin(tell, timeout_s, *, is_stopped_again=False):
    """Rank 2 is stopped in a call of all, and comes back when rank 1 has looked who is there, and has not begun.

    Where it `is_stopped_again`, then until the call is over.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    run, all_reduce = BoundProgram.run, halving_doubling.all_reduce

    def stopped(program, *where):
        BoundProgram.run = stopped_again if is_stopped_again else run
        os.kill(os.getpid(), signal.SIGSTOP)
        run(program, *where)

    def stopped_again(program, *where):
        BoundProgram.run = run
        os.kill(os.getpid(), signal.SIGSTOP)
        run(program, *where)

    def slow(ranks):
        if ranks == 3:
            halving_doubling.all_reduce, generation = all_reduce, world.survival.generation
            os.kill(int(world.store.get("stopped")), signal.SIGCONT)
            while world.survival.generation == generation:
                Event().wait(0.01)
        return all_reduce(ranks)

    if world.rank == 2:
        world.store.set("stopped", str(os.getpid()))
        BoundProgram.run = stopped
    elif world.rank == 1:
        halving_doubling.all_reduce = slow
    try:
        apart = replica.disagreement()
    except commrt.LeftBehind:  # rank 2, if the others were quicker
        apart = None
    if is_stopped_again and world.rank == 1:
        os.kill(int(world.store.get("stopped")), signal.SIGCONT)
    world.all_reduce(torch.ones(3), "sum")
    world.close()
    return apart


def stopped_twice_in_a_part(tell, timeout_s):
    """Rank 2 is stopped in a call of all; it is back when that begins anew, and is stopped again until it is over."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    run, let_go, store = BoundProgram.run, world.survival.let_go, another_connection(world.store)
    stops = iter([True, False])

    def stopped(program, moment):
        BoundProgram.run = stopped if next(stops) else run
        os.kill(os.getpid(), signal.SIGSTOP)
        raise commrt.DeadlineExceeded("no answer from ranks [3]", Place(2, 3))  # as a hop finds after a stop

    def tell_that_it_is_back(failure):
        store.set("back", "")
        let_go(failure)

    def wake(failure):
        world.survival.let_go = let_go
        os.kill(int(store.get("stopped")), signal.SIGCONT)
        store.get("back")
        let_go(failure)

    if world.rank == 2:
        store.set("stopped", str(os.getpid()))
        BoundProgram.run = stopped
    world.survival.let_go = tell_that_it_is_back if world.rank == 2 else wake
    try:
        found = replica.replicas_equal()
    except commrt.LeftBehind:
        found = "left behind"
    if world.rank == 1:
        os.kill(int(world.store.get("stopped")), signal.SIGCONT)
    last = replica.replicas_equal()
    world.close()
    return found, last


def never_through(tell, timeout_s):
    """Rank 1 comes to each attempt of a call of all, and never hears anybody; then all come to the next one.

    How often it tried, or nothing; and what all found then.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    tries = []

    def deaf(program, moment):
        tries.append(world.members)
        raise commrt.DeadlineExceeded("no answer from ranks [3]", Place(1, 3))

    run = BoundProgram.run
    if world.rank == 1:
        BoundProgram.run = deaf
    try:
        found = replica.consolidate()
    except commrt.DeadlineExceeded:
        found = len(tries)
    BoundProgram.run = run
    last = replica.replicas_equal()
    world.close()
    return found, last


def another_call(tell, timeout_s):
    """Rank 1 makes another call than the others, who have come to theirs; what each makes of it, and how late."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    store, around = another_connection(world.store), world.around

    def come(*what):
        around.gather(*what)
        store.set("come", "")

    if world.rank == 0:
        world.around = replace(around, gather=come)
    begin_s = monotonic()
    try:
        if world.rank == 1:
            store.get("come")
            world.all_reduce(torch.ones(2))
        replica.consolidate()
    except commrt.CommrtError as error:
        return str(error), monotonic() - begin_s
    return None, monotonic() - begin_s


def connecting_in_vain(tell, timeout_s, times):
    """Rank 3 dies, and rank 1 cannot connect anew so many `times`; what each makes of a step after it."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    survival, left = world.survival, iter(range(times))
    connect = survival._means.connect

    def unlucky(*where):
        if next(left, None) is not None:
            raise TransportError("not all 3 ranks connected")
        return connect(*where)

    if world.rank == 1:
        survival._means = survival._means._replace(connect=unlucky)
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in (1, 2):
        one_step(model, optimizer, world.rank, step)
    found = replica.replicas_equal()
    world.close()
    return found


def back_between_parts(tell, victim, timeout_s, *, is_in_step):
    """`victim` is stopped in a transfer, of a step or of a part of `consolidate`; it comes back as the others go on."""
    (model := model_of()).register_buffer("travels", torch.zeros(1))
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model)
    one_step(model, optimizer, world.rank, 0)
    sync_buffers, run = replica.sync_buffers, BoundProgram.run

    def stopped(program, *where):
        BoundProgram.run = run
        world.store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        run(program, *where)

    def slow():
        replica.sync_buffers = sync_buffers
        if world.rank == victim and not is_in_step:
            BoundProgram.run = stopped
        sync_buffers()
        if world.rank == 0:
            os.kill(int(world.store.get("stopped")), signal.SIGCONT)
        if world.rank != victim:
            Event().wait(0.3)  # work of their own, between two parts

    replica.sync_buffers, found = slow, []
    if world.rank == victim and is_in_step:
        BoundProgram.run = stopped
    elif world.rank == 3 and is_in_step:
        another_connection(world.store).get("stopped")  # the step is that of the other three
    one_step(model, optimizer, world.rank, 1)
    for _ in range(2):
        try:
            found.append(replica.consolidate())
        except commrt.LeftBehind:
            found.append("left behind")
    world.close()
    return found


def late_beside_a_stopped_one(tell, timeout_s):
    """Rank 0 is late in a step, and the first of those whose weights it needs is stopped; the others wait for it."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    store = another_connection(world.store)
    if world.rank == 0:
        store.get("stopped")
    one_step(model, optimizer, world.rank, 0)
    if world.rank == 1:
        store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    one_step(model, optimizer, world.rank, 1)
    counted = replica.last.counted
    if world.rank == 2:
        os.kill(int(store.get("stopped")), signal.SIGCONT)
    replica.consolidate()
    last = replica.replicas_equal()
    world.close()
    return counted, last
