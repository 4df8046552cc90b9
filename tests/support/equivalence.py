# SPDX-License-Identifier: Apache-2.0
"""Small trainings that must come out the same however gradients are averaged: what ranks of test_equivalence run."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.algorithms.torus import Torus2D

STEPS = 10
SAMPLES = 240  # divides by 1, 2, 3, 4 and 6 workers, and again by 2 micro-batches
CLASSES = 7


class Plain(nn.Module):
    """LayerNorm, not BatchNorm: statistics of a batch depend on how it is split."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x, step, rank):
        return self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(requires_grad=False)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.third = nn.Linear(32, 32)
        self.third.weight = self.second.weight

    def forward(self, x, step, rank):
        hidden = torch.tanh(self.second(self.norm(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(self.third(hidden)))


class Unused(Plain):
    """One layer that everybody leaves out in most steps, one that only one rank at a time uses."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(32, 32)
        self.by_turns = nn.Linear(32, 32)

    def forward(self, x, step, rank):
        hidden = self.norm(torch.tanh(self.first(x)))
        if step % 3 == 1:
            hidden = hidden + self.sometimes(hidden)
        if rank == step % 2:
            hidden = hidden + self.by_turns(hidden)
        return self.last(torch.tanh(self.second(hidden)))


@dataclass(frozen=True)
class Scenario:
    name: str
    model: type[nn.Module] = Plain
    micro_batches: int = 1
    clip: float = float("inf")
    decay: float = 1.0
    """By which the learning rate is multiplied after every fifth step."""
    backend: str | None = None
    """Of torch.compile, where the model is compiled."""
    adamw: bool = False


SCENARIOS = (
    Scenario("plain"),
    Scenario("accumulation", micro_batches=2),
    Scenario("clipping", clip=0.05),
    Scenario("frozen layer", model=Frozen),
    Scenario("layer unused in some steps", model=Unused),
    Scenario("tied weights", model=Tied),
    Scenario("learning rate schedule", decay=0.5),
    Scenario("compiled model", backend="aot_eager"),
    Scenario("AdamW", adamw=True),
)
INDUCTOR = Scenario("compiled by inductor", backend="inductor")


def build(scenario):
    torch.manual_seed(11)
    model = scenario.model()
    if scenario.adamw:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(SAMPLES, 20, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def parts_of(scenario, step, rank, size):
    """This rank's micro-batches of a step, as (rank, inputs, classes)."""
    x, y = batch(step)
    for part in range(scenario.micro_batches):
        mine = slice(rank + part * size, None, size * scenario.micro_batches)
        yield rank, x[mine], y[mine]


def train(scenario, call, model, optimizer, parts_in, no_sync=nullcontext):
    """Train `model` through `call` on the mean of the losses of ``parts_in(step)``; its parameters afterwards."""
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=scenario.decay)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = list(parts_in(step))
        for i, (rank, x, y) in enumerate(parts):
            with no_sync() if i < len(parts) - 1 else nullcontext():
                (cross_entropy(call(x, step, rank), y) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        optimizer.step()
        decay.step()
    return [param.detach().clone() for param in model.parameters()]


def train_joined(scenario, size):
    """One process on the whole batch; where ranks compute different things, on each rank's part of it."""

    def parts_in(step):
        if scenario.model is Unused:
            return [part for rank in range(size) for part in parts_of(scenario, step, rank, size)]
        return [(0, *batch(step))]

    model, optimizer = build(scenario)
    return train(scenario, model, model, optimizer, parts_in)


def train_attached(scenario, parts_in, world, algorithm, wire, kind):
    """The parameters, and if the replicas are equal."""
    model, optimizer = build(scenario)
    if world.rank:  # attach must overwrite this with rank 0's
        with torch.no_grad():
            for param in model.parameters():
                param.add_(world.rank)
    options = {"wire": wire, "bucket_cap_mb": 0.002, "gradients": kind}
    replica = commrt.attach(model, optimizer, algorithm, world=world, **options)
    call = torch.compile(model, backend=scenario.backend) if scenario.backend else model
    params = train(scenario, call, model, optimizer, parts_in, replica.no_sync)
    equal = replica.replicas_equal()
    replica.detach()
    return params, equal


def distance(ours, theirs):
    """The largest relative L2 distance between tensors of the same place."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in pairs)


BOTH_WAYS = "torus2d both ways"
EVERY = (*ALGORITHMS, BOTH_WAYS)
ROUNDED = {"plain": EVERY, "accumulation": ("torus2d",), "clipping": ("torus2d",)}
"""Which algorithms of a scenario run with the wires that round, too."""
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def combinations(scenario, place, ranks):
    """Algorithms, wires and where gradients lie (views are for a wire that does not round).

    What a loop does has nothing to do with what an algorithm does, so pairs suffice: each scenario meets another
    algorithm with each number of ranks, and "plain" meets all of them. On 2 ranks with all settings, else each with
    another one; on more than 3 every other scenario takes part. What is compiled, for 2 s per rank, is so on 2
    with views, and with inductor with gradients of its own.
    """
    if (scenario.backend and ranks != 2) or (ranks > 3 and scenario.name != "plain" and (place + ranks // 2) % 2):
        return
    algorithms = EVERY if scenario.name == "plain" else (EVERY[(place + ranks) % len(EVERY)],)
    for turn, algorithm in enumerate(algorithms):
        settings = [("fp32", "own"), ("fp32", "views")] if scenario.backend is None else [("fp32", "views")]
        if algorithm in ROUNDED.get(scenario.name, ()):
            settings += [("bf16", "own"), ("fp16", "own")]
        for setting in settings if ranks == 2 else [settings[(turn + place + ranks) % len(settings)]]:
            yield algorithm, *setting


def compare(tell, scenarios, chosen=None):
    """Rows (scenario, algorithm, wire, distance to DDP, distance to the joined batch, replicas equal).

    Rank 0 compares with the joined batch: where replicas are equal, so far are all from it.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    rows = []
    for place, scenario in enumerate(scenarios):
        if not (several := chosen or list(combinations(scenario, place, world.size))):
            continue

        def parts_in(step, scenario=scenario):
            return parts_of(scenario, step, world.rank, world.size)

        model, optimizer = build(scenario)
        wrapped = DistributedDataParallel(model, find_unused_parameters=scenario.model is Unused, bucket_cap_mb=0.01)
        with_ddp = train(scenario, wrapped, model, optimizer, parts_in, wrapped.no_sync)
        joined = None if world.rank else train_joined(scenario, world.size)
        for algorithm, wire, kind in several:
            made = Torus2D(both_ways=True) if algorithm == BOTH_WAYS else by_name(algorithm)
            ours, equal = train_attached(scenario, parts_in, world, made, WIRES[wire], kind)
            what = f"{algorithm}, {kind}"
            to_joined = 0.0 if joined is None else distance(ours, joined)
            rows.append((scenario.name, what, wire, distance(ours, with_ddp), to_joined, equal))
    world.close()
    dist.destroy_process_group()
    return rows
