# SPDX-License-Identifier: Apache-2.0
"""What each worker process of test_equivalence runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from scenarios import build, distance, optimizer_of, train, train_joined
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.algorithms.torus import Torus2D

BOTH_WAYS = "torus2d both ways"
EVERY = (*ALGORITHMS, BOTH_WAYS)
ROUNDED = {"plain": EVERY, "accumulation": ("torus2d",), "clipping": ("torus2d",)}
"""Which algorithms of a scenario run with the wires that round, too."""
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def algorithm_named(name):
    return Torus2D(both_ways=True) if name == BOTH_WAYS else by_name(name)


def settings_of(scenario, algorithm):
    """Wires, and where gradients lie: views are for a wire that does not round."""
    yield from (("fp32", "own"), ("fp32", "views"))
    if algorithm in ROUNDED.get(scenario.name, ()):
        yield from (("bf16", "own"), ("fp16", "own"))


def combinations(scenario, place, ranks):
    """Algorithms and their settings that a scenario runs with.

    What a loop does has nothing to do with what an algorithm does, so pairs suffice: each scenario meets another
    algorithm with each number of ranks, and "plain" meets all of them. On up to 3 ranks with all settings, on more each
    with another one; there every other scenario takes part, and none is compiled, which takes each rank 2 s.
    """
    if ranks > 3 and scenario.name != "plain" and (scenario.backend or (place + ranks) % 2):
        return
    algorithms = EVERY if scenario.name == "plain" else (EVERY[(place + ranks) % len(EVERY)],)
    for turn, algorithm in enumerate(algorithms):
        settings = list(settings_of(scenario, algorithm))
        for setting in settings if ranks <= 3 else [settings[(turn + place + ranks) % len(settings)]]:
            yield algorithm, *setting


def compare(tell, scenarios, chosen=None):
    """Rows (scenario, algorithm, wire, distance to DDP, distance to the joined batch, replicas equal)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    rows = []
    for place, scenario in enumerate(scenarios):
        if not (several := chosen or list(combinations(scenario, place, world.size))):
            continue
        with_ddp = ddp(scenario, world)
        joined = train_joined(scenario, world.size)
        for algorithm, wire, kind in several:
            ours, equal = attached(scenario, world, algorithm, WIRES[wire], kind)
            what = f"{algorithm}, {kind}"
            rows.append((scenario.name, what, wire, distance(ours, with_ddp), distance(ours, joined), equal))
    world.close()
    dist.destroy_process_group()
    return rows


def ddp(scenario, world):
    model = build(scenario)
    wrapped = DistributedDataParallel(model, find_unused_parameters=scenario.unused, bucket_cap_mb=0.01)
    return train(scenario, wrapped, model, optimizer_of(scenario, model), (world.rank, world.size), wrapped.no_sync)


def attached(scenario, world, algorithm, wire, kind):
    model = build(scenario)
    if world.rank:  # attach must overwrite this with rank 0's
        with torch.no_grad():
            for param in model.parameters():
                param.add_(world.rank)
    optimizer = optimizer_of(scenario, model)
    replica = commrt.attach(
        model, optimizer, algorithm_named(algorithm), world=world, wire=wire, bucket_cap_mb=0.002, gradients=kind
    )
    call = torch.compile(model, backend=scenario.backend) if scenario.backend else model
    params = train(scenario, call, model, optimizer, (world.rank, world.size), replica.no_sync)
    equal = replica.replicas_equal()
    replica.detach()
    return params, equal
