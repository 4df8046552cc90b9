# SPDX-License-Identifier: Apache-2.0
"""Models, batches and steps that tests of gossip share."""

from copy import deepcopy
from itertools import chain

import torch
from small_models import attached, sgd
from torch import nn

PATIENT_S = 20.0
STEPS = 7


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


with torch.random.fork_rng():
    MODELS = [made(seed) for seed in range(9)]


def model_of(seed=0):
    return deepcopy(MODELS[seed])


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def local_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    model(batch(step, rank)).square().sum().backward()
    optimizer.step()


def trainee(world, algorithm, **options):
    return attached(world, model_of(), algorithm=algorithm, **options)


def params(model):
    return [param.detach().clone() for param in model.parameters()]


def trained(world, algorithm, cap_mb=1e-4):
    model, optimizer, replica = trainee(world, algorithm, bucket_cap_mb=cap_mb)
    for step in range(STEPS):
        local_step(model, optimizer, step, world.rank)
    replica.drain()
    return params(model), replica


def sources(algorithm, step, ranks):
    """Of each rank, the one that it hears from; of one rank alone nothing."""
    hops = algorithm.schedule(step, ranks).steps()
    ends = [zip(hop.dst.tolist(), hop.src.tolist(), strict=True) for hop in hops]
    return dict(chain.from_iterable(ends))


def simulated(algorithm, ranks, steps=STEPS):
    """The same in one process: local steps, then messages, each applied when it is as late as it may be."""
    models = [model_of() for _ in range(ranks)]
    optimizers = [sgd(model) for model in models]
    in_flight = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            local_step(model, optimizer, step, rank)
        in_flight.append((sources(algorithm, step, ranks), [params(model) for model in models]))
        if len(in_flight) > algorithm.staleness:
            mixed(models, algorithm.share, *in_flight.pop(0))
    for message in in_flight:
        mixed(models, algorithm.share, *message)
    return [params(model) for model in models]


@torch.no_grad()
def mixed(models, share, source, sent):
    for rank in source:
        pairs = zip(models[rank].parameters(), sent[source[rank]], sent[rank], strict=True)
        for own, theirs, ours in pairs:
            own.copy_(own + share * (theirs - ours))


def same(one, other):
    return all(map(torch.equal, one, other))
