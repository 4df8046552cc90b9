# SPDX-License-Identifier: Apache-2.0
"""What a process does to train a model of DDP over a wire that carries codes."""

from __future__ import annotations

import torch
from torch import nn

import commrt


def trained(tell, wire):
    """The weights after five steps."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(40, 30))
    wrapped.register_comm_hook(commrt.DDPState(commrt.Direct(), wire), commrt.ddp_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 40, generator=source)).square().sum().backward()
        optimizer.step()
    row = torch.cat([param.detach().flatten() for param in wrapped.parameters()])
    torch.distributed.destroy_process_group()
    return row.tolist()
