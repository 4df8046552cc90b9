# SPDX-License-Identifier: Apache-2.0
"""What each worker process of test_faults runs."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from itertools import pairwise
from math import inf
from threading import Event
from time import monotonic

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms import halving_doubling, ring
from commrt.errors import Place
from commrt.runtime.executor import BoundProgram
from commrt.store.asking import another_connection, ask
from commrt.store.doorbell import Doorbell

STRIKE = 5
"""The step at which something happens."""


def model_of(widths=(16, 64, 64, 64, 4)):
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers)


def joined(algorithm, timeout_s, model):
    """Attached, with a deadline for the steps alone: starting may take its time."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = commrt.init(timeout_s, start_timeout_s=60)
    replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=0.01)
    return replica, optimizer, world


def one_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def struck_in_mid_step(tell, algorithm, victim, timeout_s):
    """In step STRIKE, when its last layers' gradients have left, the victim asks to be struck."""
    model = model_of()
    _, optimizer, world = joined(algorithm, timeout_s, model)

    def wait_for_the_blow(_):
        if world.rank == victim and step == STRIKE:
            tell("mid-step")
            while True:
                signal.pause()

    model[2].weight.register_hook(wait_for_the_blow)
    for step in range(STRIKE + 3):  # read by the hook
        one_step(model, optimizer, world.rank, step)
    return "finished"


def out_of_data(tell, early, stays, timeout_s):
    """Rank `early` has data for STRIKE steps, the others for more, and nobody uses join."""
    model = model_of()
    _, optimizer, world = joined(commrt.Torus2D(), timeout_s, model)
    for step in range(STRIKE if world.rank == early else STRIKE + 3):
        one_step(model, optimizer, world.rank, step)
    if stays:
        tell("stays")
        while True:
            signal.pause()
    return "finished"


def uneven_data_with_join(tell, steps):
    """Rank r has data for ``steps[r]`` steps."""
    model = model_of()
    replica, optimizer, world = joined(commrt.Torus2D(), 20, model)
    with replica.join():
        for step in range(steps[world.rank]):
            one_step(model, optimizer, world.rank, step)
    equal, step = replica.replicas_equal(), replica.step
    world.close()
    return equal, step


def other_layout(tell, odd_one, what):
    """Rank `odd_one` comes with something else than the others."""
    torch.set_num_threads(1)
    odd = int(os.environ["RANK"]) == odd_one
    if what == "world size" and odd:
        os.environ["WORLD_SIZE"] = "7"
    world = commrt.init(10)
    widths = (16, 64, 32, 64, 4) if what == "layers" and odd else (16, 64, 64, 64, 4)
    model = model_of(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = commrt.Ring() if what == "algorithm" and odd else commrt.Torus2D()
    wire = torch.bfloat16 if what == "wire" and odd else None
    cap = 1.0 if what == "bucket size" and odd else 0.01
    commrt.attach(model, optimizer, algorithm, world=world, wire=wire, bucket_cap_mb=cap)
    return "attached"


def leaves_with_an_error(tell):
    """Rank 1 leaves its world by an exception of its own, and lives on."""
    world = commrt.init(200)
    with suppress(KeyError), world:
        if world.rank == 1:
            raise KeyError("of the user's own")
        world.run(ring.all_reduce(world.size), torch.ones(8))
    tell("stays")
    while True:
        signal.pause()


def nobody_else(tell, timeout_s):
    """Only rank 0 comes to the world."""
    if int(os.environ["RANK"]) == 0:
        commrt.init(start_timeout_s=timeout_s)
    return "finished"


def ringing(tell):
    """A process with a doorbell, and a child that outlives it, as a DataLoader's worker does for a while."""
    bell = Doorbell("127.0.0.1")
    child = os.fork()
    if child == 0:
        signal.pause()
    tell((bell.address, child))
    signal.pause()


STEPS = 30
"""Steps of a gossiping casualty."""


def gossiping(tell, algorithm, timeout_s, pauses=(), awaited=None):
    """Trains, saying each step, then makes replicas equal; how it ended. Waits for `awaited` to be left behind."""
    model = model_of()
    replica, optimizer, world = joined(algorithm, timeout_s, model)
    with world:
        try:
            for step in range(STEPS):
                tell(step)
                one_step(model, optimizer, world.rank, step)
        except commrt.LeftBehind:
            world.store.set("left behind", "")
            raise
        if world.rank in pauses:
            tell("consolidating")
            signal.pause()
        replica.consolidate()
        if awaited is not None:
            tell("done")
            world.store.wait(["left behind"])
        return replica.replicas_equal(), [loss.rank for loss in replica.lost], list(world.members)


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


def back_amid_a_call(tell, victim, timeout_s, *, is_hasty=False):
    """`victim` is stopped, and the others consolidate; between two parts of that it comes back and does so too.

    Where it `is_hasty` it learns only that it is too late when it is a member again: the others said so just then.
    """
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    sync_buffers, found = replica.sync_buffers, []

    def slow():
        if world.rank == 0:
            os.kill(int(world.store.get("stopped")), signal.SIGCONT)
        if world.rank != victim:
            another_connection(world.store).get("told")
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
    found.append(replica.replicas_equal())
    world.close()
    return found


def _look_only_as_a_member(survival):
    require_next, is_amid = survival.calls.require_next, survival._is_amid_another_call
    survival.calls.require_next = lambda: survival.generation and require_next()
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
    """Rank 1 comes to each attempt of a call of all, and never hears anybody; how often it tried, or what all found."""
    replica, optimizer, world = joined(commrt.BackupWorkers(1), timeout_s, model := model_of())
    one_step(model, optimizer, world.rank, 0)
    tries = []

    def deaf(program, moment):
        tries.append(world.members)
        raise commrt.DeadlineExceeded("no answer from ranks [3]", Place(1, 3))

    if world.rank == 1:
        BoundProgram.run = deaf
    try:
        return replica.replicas_equal()
    except commrt.DeadlineExceeded:
        return len(tries)


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
