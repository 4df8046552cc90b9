# SPDX-License-Identifier: Apache-2.0
"""Worker processes of test_same_bits: a DDP model over the backend."""

from __future__ import annotations

from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commrt import c10d


def trained_in_buckets(tell, cap_mb, steps):
    """Digests of the parameters of a DDP model of 30 MB after `steps`, and of the gradients of the last one."""
    dist.init_process_group(c10d.NAME)
    torch.manual_seed(0)
    wide = nn.Sequential(*(each for _ in range(7) for each in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 4))
    model = DistributedDataParallel(wide, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1024, generator=source)).square().sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    both = (each for param in wide.parameters() for each in (param.detach(), param.grad))
    return [sha256(each.numpy()).hexdigest() for each in both]
