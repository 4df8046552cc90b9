# SPDX-License-Identifier: Apache-2.0
"""The sum of sparse tensors over all ranks, made of all-gathers that a caller passes in.

Runs on the thread that calls, which waits for each of them, and then writes to the caller's tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commrt.c10d.call_options import option
from commrt.c10d.group_work import GroupWork
from commrt.errors import UsageError


def sparse_all_reduce(
    tensor: Tensor, opts: Any, ranks: int, all_gather: Callable[..., dist.Work]
) -> dist.Work:
    """Replace the sparse `tensor` by the sum over all `ranks`; the work that returns is complete.

    Cost: three all-gathers, of the counts, then of as many indices and values as the fullest rank
    has.
    """
    op = option(opts, "reduceOp", dist.ReduceOp.SUM)
    if op != dist.ReduceOp.SUM:
        name = getattr(op, "op", op).name
        raise UsageError(f"{name} of sparse tensors: only their SUM can be formed; give dense ones")

    def gathered(rows: Tensor, count: int) -> list[Tensor]:
        padded = rows.new_zeros((count, *rows.shape[1:]))
        padded[: len(rows)] = rows
        outputs = [torch.empty_like(padded) for _ in range(ranks)]
        all_gather(outputs, padded).wait()
        return outputs

    own = tensor.coalesce()
    number = torch.tensor([len(own.values())], device=own.device)
    counts = [int(count) for count in gathered(number, 1)]
    indices = gathered(own.indices().t(), max(counts))
    values = gathered(own.values(), max(counts))
    parts = [
        torch.sparse_coo_tensor(index[:count].t(), value[:count], own.shape)
        for index, value, count in zip(indices, values, counts, strict=True)
    ]
    with torch.no_grad():
        tensor.copy_(sum(parts[1:], parts[0]).coalesce())
    return GroupWork(None, [tensor])
