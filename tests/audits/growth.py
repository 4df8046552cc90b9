# SPDX-License-Identifier: Apache-2.0
"""Let ranks come, die and come again in one job: ``python tests/audits/growth.py --runs 60``.

A job begins with two ranks, or with three of which one is a backup. Ranks come until there are four, one dies at a
drawn place of a step, and two more come. With backup workers the result is checked against the same steps in one
process, with the gradients that counted, and each sample against its epoch: none may be lost, or used twice. With
gossip each mix is checked against what both ranks had sent in that step, and with local SGD each mean against what its
ranks had sent. After some steps all meet in a collective, and ranks ask to stop at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from fault_cost import (
    WHERE,
    Fault,
    FaultInjector,
    backward,
    drained,
    network,
    reference_holds,
    require_equal,
    trainee_of,
)

import commrt
from commrt.local_sgd import LocalSGD
from commrt.testing.processes import run_processes

PLACES, SAMPLES = 6, 240
MOST_BEFORE = 4
"""So many ranks are there before one dies, or too few would be left."""
SAMPLES_OF_DDP = 64
"""In a step of the loop over DDP, for four ranks of five."""
MORE = 20
"""Steps from the one in which the last rank comes."""


class Growing:
    """What the test's own process knows: who waits to come, at which step, who dies, and what ranks have told."""

    def __init__(self, comes, victim, dies):
        self.comes, self.waiting, self.latest, self.used = dict(comes), {}, 0, []
        self.victim, self.dies, self.met = victim, dies, {}

    def on_message(self, rank, message, process):
        match message:
            case "kill":
                process.kill()
                return True
            case "waits":
                self.waiting[rank] = process
            case ("met", number, ranks):
                assert self.met.setdefault(number, ranks) == ranks, (rank, number, ranks, self.met[number])
            case ("used", step, epoch, samples):
                self.latest = max(self.latest, step)
                self.used.append((step, epoch, *samples))
            case (("gossiped" | "merged"), step, *told):
                self.latest = max(self.latest, step)
                self.used.append((rank, step, *told))
                if rank == self.victim and step >= self.dies and len({each for each, *_ in self.used}) >= MOST_BEFORE:
                    process.kill()
                    return True
        for place in [place for place in self.waiting if self.comes[place] <= self.latest]:
            os.kill(self.waiting.pop(place).pid, signal.SIGUSR1)
        return None


class Loop:
    """What a loop does after each step: a collective if one is due, and stop after so many.

    It stops `MORE` steps after the rank that came last, at the earliest.
    """

    def __init__(self, tell, world, replica, steps, every):
        self._tell, self._world, self._replica, self._steps, self._every = tell, world, replica, steps, every
        self._met = replica.step // every
        if world.is_replacement and world.store.add("came", 1) == PLACES - world.founders:
            world.store.set("goal", str(replica.step + MORE))

    def goes_on(self):
        """Meet the others, or ask to stop, if that is due; return False after the last step."""
        step, store = self._replica.step, self._world.store
        while step // self._every > self._met:
            self._met += 1
            ranks = torch.ones(1)
            self._world.all_reduce(ranks, "sum")
            self._tell(("met", self._met, int(ranks)))
        if step >= self._steps and store.check(["goal"]) and step >= int(store.get("goal")):
            self._replica.stop()
        return not self._replica.stopping


class Injector(FaultInjector):
    """Faults of this process once enough ranks are there."""

    def __init__(self, tell, faults, world):
        super().__init__(tell, faults)
        self._world = world

    def at(self, where, step):
        if len(self._world.members) >= MOST_BEFORE:
            super().at(where, step)


def opened(tell, founders):
    """Open the world; a rank that is no founder waits until it is to come."""
    torch.set_num_threads(1)
    if int(os.environ["RANK"]) >= founders:
        asks, tells = os.pipe()  # a signal that this thread alone blocks would end the process in another one
        signal.signal(signal.SIGUSR1, lambda *_: os.write(tells, b"!"))
        tell("waits")
        os.read(asks, 1)
    os.environ["WORLD_SIZE"] = str(founders)
    return commrt.init(15.0, start_timeout_s=60.0, up_to=PLACES)


def work(tell, backups, steps, every, faults):
    with opened(tell, 2 + backups) as world:
        shares = commrt.Shares(range(SAMPLES), 4)
        trainee = trainee_of(world, commrt.BackupWorkers(backups), also=[shares])
        replica, first = trainee.replica, trainee.replica.step
        injector = Injector(tell, [fault for fault in faults if fault.rank == world.rank], world)
        injector.watch(replica)
        loop = Loop(tell, world, replica, steps, every)
        while not replica.stopping:
            for samples in shares.batches(shares, replica):
                if trainee.step(0.004):
                    tell(("used", replica.last.step, shares.epoch, samples))
                shares.done()
                drained(replica)
                if not loop.goes_on():
                    break
        equal = replica.replicas_equal()
        return trainee.report(equal=equal, first=first, step=replica.step, members=[*world.members])


def look_at(model):
    """Return what returns a linear function of the weights, the same function on all ranks."""
    parts = [torch.randn_like(param) for param in network().parameters()]
    return lambda: sum((a * b).sum().item() for a, b in zip(parts, model.parameters(), strict=True))


def local(tell, steps, every):
    """Train on one rank by local SGD, and tell after each period what it sent, what all have now, and who they are."""
    while True:
        try:
            return local_once(tell, steps, every)
        except commrt.UsageError as error:
            if "start it again" not in str(error):  # the others have met before they could give their state
                raise


def local_once(tell, steps, every):
    """Do so, but a process that comes may have to start again."""
    with opened(tell, 2) as world:
        trainee = trainee_of(world, LocalSGD(4))
        replica, first, sent = trainee.replica, trainee.replica.step, {}
        seen, exchange, averaged = look_at(trainee.model), replica._exchange, []
        send, receive = exchange.send, exchange.receive

        def note(fragment, in_flight):
            sent[in_flight.step] = seen()
            send(fragment, in_flight)

        def note_ranks(fragment, in_flight):
            arrived = receive(fragment, in_flight)
            averaged[:] = arrived.generation.ranks
            return arrived

        exchange.send, exchange.receive = note, note_ranks
        loop, is_over = Loop(tell, world, replica, steps, every), False
        while not is_over:
            step = replica.step
            backward(trainee.model, world.rank, step)
            trainee.optimizer.step()
            if step + 1 in sent:
                tell(("merged", step + 1, sent[step + 1], seen(), tuple(averaged)))
            is_over = not loop.goes_on()
        return ended(trainee, first)


def ended(trainee, first):
    """Make all ranks equal, and return what is audited of this one."""
    step = trainee.replica.step
    trainee.replica.consolidate()
    equal = trainee.replica.replicas_equal()
    return trainee.report(equal=equal, first=first, step=step, members=[*trainee.world.members])


def gossip(tell, steps, every):
    """Train on one rank by gossip, and tell in each step a linear function of what it mixed, and of what it sent."""
    with opened(tell, 2) as world:
        trainee = trainee_of(world, commrt.Gossip(), bucket_cap_mb=25)  # a mix is lost as a whole where ranks change
        replica, first, before = trainee.replica, trainee.replica.step, None
        seen = look_at(trainee.model)
        loop, is_over = Loop(tell, world, replica, steps, every), False
        while not is_over:
            step = replica.step
            backward(trainee.model, world.rank, step)
            mixed = seen()
            trainee.optimizer.step()
            sent = seen()
            heard = [] if before is None else sorted(replica.last.received_from)
            tell(("gossiped", step, sent, before, mixed, heard))
            before, is_over = step, not loop.goes_on()
        return ended(trainee, first)


ALONE = {"gossip": gossip, "local SGD": local}


def run(seed, steps=300, way=0):
    """Make one run, and return what happened; raises `AssertionError` if it is wrong. `way` may be so many backups."""
    draw = Random(seed)
    comes = {2: draw.randrange(steps // 6), 3: draw.randrange(steps // 4)}
    dies = draw.randrange(steps // 3, steps // 2)
    comes |= {4: draw.randrange(dies, steps * 2 // 3), 5: draw.randrange(dies, steps * 2 // 3)}
    fault = Fault(draw.randrange(4), dies, draw.choice(WHERE), "kill")
    growing = Growing(comes, fault.rank, dies)
    every = draw.randrange(7, 40)
    given = (ALONE[way], steps, every) if way in ALONE else (work, way, steps, every, [fault])
    ends = run_processes(PLACES, *given, limit_s=180.0, on_message=growing.on_message, holds_store=True)
    alive = [end for end in ends if end.rank != fault.rank]
    require_equal(alive)
    members = alive[0].value["members"]
    assert {*members} == {end.rank for end in alive}, members
    assert len({end.value["step"] for end in alive}) == 1, "not all stopped after the same step"
    came = [end.value["first"] for end in alive if end.value["first"]]
    if way in ALONE:
        return fault, way, (require_mixes if way == "gossip" else require_means)(growing.used, steps), came
    algorithm = commrt.BackupWorkers(way)
    used = reference_holds(alive, None, steps)
    assert len(used[max(used)]) == algorithm.needed_among(len(members), 2 + way), "ranks that came do not count"
    require_each_sample_once(growing.used)
    return fault, f"{way} backups", len(used), came


def run_ddp(seed, steps=300):
    """Make one run of a loop over DDP that is reconfigured, see `run`; for torch 2.14 and later."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    loops = import_module("test_loops_survive")
    draw, samples = Random(seed), steps * SAMPLES_OF_DDP
    dies = draw.randrange(samples // 3, samples // 2)
    late = {2: draw.randrange(samples // 6), 3: draw.randrange(samples // 4)}
    late |= {place: draw.randrange(dies, samples * 2 // 3) for place in (4, 5)}
    kills = {draw.randrange(4): dies}
    with TemporaryDirectory() as folder:
        made, lived = loops.survived(
            "ddp_survives", Path(folder), PLACES, late=late, kills=kills, epochs=samples // loops.IMAGES
        )
    assert len(lived) == PLACES - 1, lived
    return f"kill rank {[*kills]}", "DDP", len(made), late


def require_means(told, steps):
    """Return how many means were right; raise unless each is that of what its ranks sent."""
    sent = {(rank, step): value for rank, step, value, *_ in told}
    checked = 0
    for rank, step, _, after, members in told:
        assert rank in members, (rank, step, members)
        if all((member, step) in sent for member in members):  # else one died before it could tell
            wanted = sum(sent[member, step] for member in members) / len(members)
            assert abs(after - wanted) < 1e-9, (rank, step, members, after, wanted)
            checked += 1
    assert checked > steps // 3, checked
    return checked


def require_mixes(told, steps):
    """Return how many mixes were right; raise unless each is that of what both sent in that step."""
    sent = {(rank, step): value for rank, step, value, *_ in told}
    checked, unknown = 0, 0
    for rank, _, _, step, mixed, heard in told:
        if step is None:
            continue
        if any((peer, step) not in sent for peer in heard):  # it died before it could tell
            unknown += 1
            continue
        wanted = sent[rank, step] + sum(0.5 * (sent[peer, step] - sent[rank, step]) for peer in heard)
        assert abs(mixed - wanted) < 1e-9, (rank, step, heard, mixed, wanted)
        checked += len(heard)
    assert unknown <= 1, unknown
    assert checked > 2 * steps, checked
    return checked


def require_each_sample_once(used, lost=4):
    """Raise unless each sample of whole epochs was used once; a rank that dies may not have told of its last `lost`."""
    last = max(epoch for _, epoch, *_ in used)
    missing = 0
    for epoch in range(last + 1):
        # the last few of an epoch are the same on all ranks, whose mean counts them once
        uses = {(step, sample) for step, each, *samples in used for sample in samples if each == epoch}
        times = Counter(sample for _, sample in uses)
        assert not times or max(times.values()) == 1, f"epoch {epoch}: used twice"
        missing += (SAMPLES - len(times)) * (epoch < last)
    assert missing <= lost, f"{missing} samples were not used"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ddp", action="store_true", help="the loop of examples/ddp_survives.py instead (torch 2.14)")
    options = parser.parse_args()
    wrong = 0
    for seed in range(options.seed, options.seed + options.runs):
        try:
            made = run_ddp(seed) if options.ddp else run(seed, way=(0, 1, *ALONE)[seed % 4])
            print(seed, *made, flush=True)
        except Exception as error:  # all runs are to be made
            wrong += 1
            print(seed, "WRONG", type(error).__name__, error, flush=True)
    print(f"{wrong} wrong of {options.runs}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
