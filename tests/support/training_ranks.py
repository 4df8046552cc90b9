# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own: one detaches first, or all compile the optimizer's step, or train a model of DDP."""

from hashlib import sha256
from threading import Event

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt import c10d


def detached_first(_, algorithm, has_detached):
    """Rank 0, which holds the store, detaches and closes; after a while the others ask for a mean."""
    with commrt.init(timeout_s=10) as world:
        model = nn.Linear(3, 1)
        replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
        if world.rank:
            while not has_detached.exists():
                Event().wait(0.01)
            Event().wait(0.3)  # rank 0's process would have ended by then
            replica.disagreement()
        replica.detach()
        has_detached.touch()


def with_compiled_step(_, algorithm, compiled):
    """The weights after a few steps; torch tells all threads of a process that one of them compiles."""
    with commrt.init(60.0) as world:
        model = nn.Linear(4, 2)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
            model.bias.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = commrt.attach(model, optimizer, algorithm, world=world)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(4):
            model(torch.ones(3, 4) * (world.rank + 1)).square().sum().backward()
            step()
            optimizer.zero_grad()
        replica.consolidate()
        return [param.tolist() for param in model.parameters()]


def accounts(tell, wire):
    """What this rank's gradients were, what it was told of averages, and what it owes: all flat, summed over steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.Linear(40, 30)  # DDP's first step has the weight first, later ones the bias
    wrapped, state = DistributedDataParallel(layer), commrt.DDPState(commrt.Direct(), wire)
    wrapped.register_comm_hook(state, commrt.ddp_hook)
    source, told, true = torch.Generator().manual_seed(dist.get_rank()), 0.0, 0.0
    for _ in range(5):
        wrapped.zero_grad()
        x = torch.randn(8, 40, generator=source)
        wrapped(x).square().sum().backward()
        told += torch.cat([param.grad.flatten() for param in layer.parameters()])
        alone = nn.Linear(40, 30)
        alone.load_state_dict(layer.state_dict())
        alone(x).square().sum().backward()
        true += torch.cat([param.grad.flatten() for param in alone.parameters()])
    owed = torch.cat([state._residual_of[id(param)] for param in layer.parameters()])
    dist.destroy_process_group()
    return [row.tolist() for row in (true, told, owed)]


def trained_in_buckets(tell, cap_mb, steps):
    """Digests of the parameters of a DDP model of 7 MB after `steps`, and of the gradients of the last one."""
    dist.init_process_group(c10d.NAME)
    torch.manual_seed(0)
    wide = nn.Sequential(*(each for _ in range(7) for each in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 4))
    model = DistributedDataParallel(wide, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 512, generator=source)).square().sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    both = (each for param in wide.parameters() for each in (param.detach(), param.grad))
    return [sha256(each.numpy()).hexdigest() for each in both]
