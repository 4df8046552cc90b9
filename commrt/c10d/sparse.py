# SPDX-License-Identifier: Apache-2.0
"""The sum of sparse tensors, as DistributedDataParallel needs it for sparse embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commrt.c10d.group_work import GroupWork
from commrt.errors import UsageError

AllGather = Callable[[Sequence[Tensor], Tensor], dist.Work]
"""(outputs, tensor) -> the work of an all-gather."""

__all__ = ["sparse_all_reduce"]


def sparse_all_reduce(tensor: Tensor, op: Any, ranks: int, all_gather: AllGather) -> dist.Work:
    """Replace the sparse `tensor` by the sum over all ranks; the work is complete when this returns.

    Cost: three all-gathers, of the counts, then of as many indices and values as the fullest rank has.
    """
    if op != dist.ReduceOp.SUM:
        raise UsageError(f"{op} of sparse tensors: only their SUM can be formed; pass dense copies")

    def gathered(rows: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(rows) for _ in range(ranks)]
        all_gather(outputs, rows).wait()
        return outputs

    own = tensor.coalesce()
    counts = gathered(torch.tensor([own._nnz()], device=own.device))  # noqa: SLF001  # torch's name for it
    most = int(max(count.item() for count in counts))
    indices = gathered(_padded(own.indices().t(), most))
    values = gathered(_padded(own.values(), most))
    parts = [
        torch.sparse_coo_tensor(index[: int(count)].t(), value[: int(count)], own.shape)
        for index, value, count in zip(indices, values, counts, strict=True)
    ]
    total = sum(parts[1:], parts[0]).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return GroupWork(None, [tensor])


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded
