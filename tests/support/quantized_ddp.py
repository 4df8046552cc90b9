# SPDX-License-Identifier: Apache-2.0
"""What a process does to train a model of DDP over a wire that carries codes."""

from __future__ import annotations

import torch
from torch import nn

import commrt


def accounts(tell, wire):
    """What this rank's gradients were, what it was told of averages, and what it owes: all flat, summed over steps."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.Linear(40, 30)  # DDP's first step has the weight first, later ones the bias
    wrapped, state = nn.parallel.DistributedDataParallel(layer), commrt.DDPState(commrt.Direct(), wire)
    wrapped.register_comm_hook(state, commrt.ddp_hook)
    source, told, true = torch.Generator().manual_seed(torch.distributed.get_rank()), 0.0, 0.0
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
    torch.distributed.destroy_process_group()
    return [row.tolist() for row in (true, told, owed)]
