# SPDX-License-Identifier: Apache-2.0
"""Measure what faults cost backup workers: ``python tests/audits/fault_cost.py`` kills or stops processes in a step.

Each run trains a small network up to a number of updates, with a fault at each place of a step. The result is checked
against the same steps in one process, with the gradients that counted: none may be lost, or used twice. The time to
continue is the longest step, or collective, of a rank without a fault.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, product
from random import Random
from statistics import median
from threading import Event

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.testing.processes import RESTART, run_processes

STEPS, STOP_S, SLOW_S = 12, 1.5, 0.5
MORE = 8
"""Steps after the first one in which a replacement counts."""
MOST_S = 0.04
"""The longest compute time of a step in such runs. With equal times, a rank that fetches weights is late again."""
WHERE = ("backward", "counted", "reducing", "through")
PLACES = [("slow", "backward"), *product(["stop"], WHERE[:-1]), *product(["kill"], WHERE)]
REPLACED = [("replace", "backward"), ("replace", "reducing"), ("replace", "through")]
TOGETHER = [("stop", "gathered"), ("kill", "gathered")]


@dataclass(frozen=True)
class RunLength:
    steps: int = STEPS
    """Number of updates, or of batches in each epoch."""
    epochs: int = 0
    """Number of epochs. Each has the same number of batches for every rank, so ranks end at different steps."""
    most_s: float = 0.0
    """The longest compute time of a step."""


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, and its place in the first step from `step` on that reaches this place."""

    rank: int
    step: int
    where: str
    """``backward``: before it announces; ``counted``: before it reduces; ``reducing``; ``through``: it has the sum;
    ``gathered``: after the last step, or the first epoch, where all compare their weights."""
    kind: str
    """``kill``, ``replace`` by another process, ``stop`` for a while, or ``slow``."""

    def __str__(self):
        return f"{self.kind} rank {self.rank} {self.where}"


def network():
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise((16, 64, 64, 64, 4)) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).double()


def backward(model, rank, version):
    generator = torch.Generator().manual_seed(1000 * version + rank)
    x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    model.zero_grad()
    cross_entropy(model(x), torch.randint(0, 4, (8,), generator=generator)).backward()


class FaultInjector:
    """Faults of this process, at the places that its list names."""

    def __init__(self, tell, faults):
        self._tell, self._faults = tell, list(faults)

    def at(self, where, step):
        for fault in [fault for fault in self._faults if fault.where == where and fault.step <= step]:
            self._faults.remove(fault)
            if not self.applies(fault):
                continue
            if fault.kind == "slow":
                time.sleep(SLOW_S)
            else:
                self._tell(fault.kind)
                Event().wait(0.2 if fault.kind == "stop" else 60.0)

    def applies(self, _):
        """Return False if this fault is left out."""
        return True

    def watch(self, replica):
        """Add places: in the backward pass, before and after the first bucket, and after the last one."""
        engine = replica._engine
        whole = engine.reduce_now

        def reduce_now(bucket, step, members):
            if bucket.index == 0:
                self.at("counted", step)
            span = whole(bucket, step, members)
            if bucket.index == 0:
                self.at("reducing", step)
            if bucket.index == len(engine.buckets) - 1:
                self.at("through", step)
            return span

        engine.reduce_now = reduce_now
        replica.model[2].weight.register_hook(lambda _: self.at("backward", replica.step))


class Trainee:
    """One rank that trains the network, and notes who counted in each step in which it did."""

    def __init__(self, world, algorithm, seed=0, **options):
        self.rank, self.seed = world.rank, seed
        self.world = world
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        begin_s = time.perf_counter()
        self.replica = commrt.attach(self.model, self.optimizer, algorithm, **({"bucket_cap_mb": 0.01} | options))
        self.attached_s = time.perf_counter() - begin_s if world.is_replacement else None
        self.used: dict[int, tuple[int, ...]] = {}
        self.longest_s = 0.0

    def step(self, most_s):
        """Make a step that computes for up to `most_s`; return True if it counted."""
        begin_s, version = time.perf_counter(), self.replica.step
        Event().wait(Random(f"{self.seed} {self.rank} {version}").uniform(0.0, most_s))
        backward(self.model, self.rank, version)
        self.optimizer.step()
        self.longest_s = max(self.longest_s, time.perf_counter() - begin_s)
        last = self.replica.last
        if last is None or not last.counted:
            return False
        self.used[last.step] = last.members
        return True

    def report(self, **more):
        params = [param.detach().numpy() for param in self.model.parameters()]
        own = {"used": self.used, "params": params, "longest_s": self.longest_s, "attached_s": self.attached_s}
        return own | more


def trainee_of(world, *given, **options):
    """Return what trains on one rank; a rank that comes loads a checkpoint, as scripts do, which must not harm it."""
    trainee = Trainee(world, *given, **options)
    if world.is_replacement:
        old, before = {name: 0 * value for name, value in trainee.model.state_dict().items()}, trainee.replica.step
        trainee.model.load_state_dict(old)
        trainee.replica.load_state_dict({"step": 0})
        assert trainee.replica.step == before
    return trainee


def work(tell, algorithm, timeout_s, length, faults):
    """Train on one rank, and report which gradients counted."""
    torch.set_num_threads(1)
    with commrt.init(timeout_s, start_timeout_s=60.0) as world:
        trainee = trainee_of(world, algorithm)
        replica = trainee.replica
        own = [fault for fault in faults if fault.rank == world.rank and not world.is_replacement]
        injector = FaultInjector(tell, own)
        injector.watch(replica)
        replica.before_giving_up(lambda: tell(("giving up", replica.step)))
        are_replaced = any(each.kind == "replace" for each in faults)

        def is_over(batches):
            if length.epochs:
                return batches == length.steps
            return replica.step >= (_goal(world, trainee.used) if are_replaced else length.steps)

        equal, together_s = True, 0.0
        for _ in range(length.epochs or 1):
            batches = 0
            drained(replica)
            while not is_over(batches):
                trainee.step(max(length.most_s, MOST_S * are_replaced))
                batches += 1
                drained(replica)
            injector.at("gathered", replica.step)
            begin_s = time.perf_counter()
            equal = replica.replicas_equal() and equal
            together_s = max(together_s, time.perf_counter() - begin_s)
        return trainee.report(equal=equal, together_s=together_s, lost=[loss.rank for loss in replica.lost])


def _goal(world, used):
    if world.is_replacement and used:
        world.store.compare_set("goal", "", str(min(used) + MORE))
    return int(world.store.get("goal")) if world.store.check(["goal"]) else sys.maxsize


def drained(replica):
    """Return the replica, with the others' state if it was late."""
    replica.drain()
    return replica


def run_with_faults(ranks, algorithm, faults, length=RunLength(), *, timeout_s=15.0, stop_s=STOP_S):
    def on_message(_, message, process):
        if message in {"kill", "replace"}:
            process.kill()
            return RESTART if message == "replace" else True
        if message == "stop" and process.pid is not None:
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(stop_s, os.kill, (process.pid, signal.SIGCONT)).start()
        return None

    limit_s = 60.0 + 0.2 * length.steps
    return run_processes(ranks, work, algorithm, timeout_s, length, faults, limit_s=limit_s, on_message=on_message)


def reference_holds(ends, needed, least=STEPS):
    """Return who counted in each step; raise `AssertionError` unless all `ends` are those of `needed` gradients in each
    of at least `least` steps. None: of any number.
    """
    used = counted([end.value["used"] for end in ends], needed, least)
    model = network()
    wanted = same_steps(used, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for end in ends:
        if not are_close(wanted, map(torch.from_numpy, end.value["params"])):
            raise AssertionError(f"rank {end.rank} has other weights than the same steps in one process give")
    return used


def counted(found, needed, least):
    """Return who counted in each step, as all of `found` say; raise as `reference_holds` does."""
    used: dict[int, tuple[int, ...]] = {}
    for step, members in (each for mine in found for each in mine.items()):
        if used.setdefault(step, members) != members:
            raise AssertionError(f"step {step}: {members} and {used[step]}")
    are_as_many = all(needed in {None, len({*members})} for members in used.values())
    if len(used) < least or sorted(used) != list(range(len(used))) or not are_as_many:
        raise AssertionError(f"not {needed} gradients in each step: {used}")
    return used


def same_steps(used, model, optimizer, backward=backward):
    """Return the parameters after the steps of one process with the gradients of these ranks in each."""
    for step in range(len(used)):
        gradients = []
        for rank in used[step]:
            backward(model, rank, step)
            gradients.append([param.grad.clone() for param in model.parameters()])
        for param, *parts in zip(model.parameters(), *gradients, strict=True):
            param.grad = sum(parts) / len(parts)
        optimizer.step()
    return [*model.parameters()]


def are_close(ours, theirs):
    """Return True if the parameters are equal but for what rounding leaves of another order."""
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


UPDATES, EPOCHS = RunLength(), RunLength(epochs=2, most_s=0.02)


def cases(pairs):
    """Yield cases: one fault among four ranks, or two among six."""
    for kind, where in [*PLACES, *REPLACED, *TOGETHER]:
        yield UPDATES, [Fault(2, 4, where, kind)]
    for where in ("backward", "reducing", "gathered"):
        yield UPDATES, [Fault(0, 4, where, "stop")]
    for kind, where in [*PLACES, *TOGETHER]:
        yield EPOCHS, [Fault(2, 4, where, kind)]
    if pairs:
        for (kind, where), (other, there) in combinations_with_replacement([*PLACES, *REPLACED, *TOGETHER], 2):
            yield UPDATES, [Fault(2, 4, where, kind), Fault(4, 4, there, other)]
        for kind, where in PLACES:
            yield UPDATES, [Fault(0, 4, "reducing", "stop"), Fault(4, 4, where, kind)]
            yield EPOCHS, [Fault(2, 4, where, kind), Fault(4, 4, "gathered", "kill")]


def measure(length, faults, inner, runs):
    """Run `runs` times and return the times; raise if a step was lost or done twice, or a rank ended wrongly."""
    ranks, backups = 2 + 2 * len(faults), len(faults)
    least = length.steps // 2 if length.epochs else length.steps
    waited = "together_s" if any(fault.where == "gathered" for fault in faults) else "longest_s"
    hit = {fault.rank for fault in faults}
    dead = {fault.rank for fault in faults if fault.kind == "kill"}
    stop_s = 4.0 if backups > 1 else STOP_S
    waits_s, attached_s = [], []
    for _ in range(runs):
        ends = run_with_faults(ranks, commrt.BackupWorkers(backups, inner), faults, length, stop_s=stop_s)
        alive = [end for end in ends if end.exit_code == 0 or end.rank not in dead]
        require_equal(alive)
        reference_holds(alive, ranks - backups, least)
        waits_s.append(max(end.value[waited] for end in alive if end.rank not in hit))
        attached_s += [end.value["attached_s"] for end in alive if end.value["attached_s"] is not None]
    return seconds(waits_s) + (f", let in after {median(attached_s):.2f} s" if attached_s else "")


def require_equal(ends):
    """Raise unless all ranks came to the end, with replicas that they found equal."""
    if broken := [f"rank {end.rank}: {end.error}" for end in ends if end.value is None or not end.value["equal"]]:
        raise RuntimeError("; ".join(broken))


def seconds(times_s):
    return f"{median(times_s):6.2f} s, at most {max(times_s):.2f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each case")
    parser.add_argument("--pairs", action="store_true", help="also run two faults at once, with two backups")
    options = parser.parse_args()
    for inner in (commrt.Torus2D(), commrt.Ring()):
        name = type(inner).__name__
        for length, faults in cases(options.pairs):
            case = " + ".join(map(str, faults)) + ", in epochs" * bool(length.epochs)
            print(f"{name:<8} {case:<50} {measure(length, faults, inner, options.runs)}", flush=True)


if __name__ == "__main__":
    main()
