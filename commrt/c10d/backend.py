# SPDX-License-Identifier: Apache-2.0
"""The backend that torch 2.14 and later get from ``init_process_group("commrt")``: one per process group and device."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group import ProcessGroupWorld, group_of
from commrt.c10d.group_work import as_dist_error
from commrt.c10d.methods import NAME, Methods
from commrt.errors import UsageError

__all__ = ["CommrtBackend", "create"]


class CommrtBackend(Methods, Backend):
    """A backend whose collectives run proven schedules. Its methods are those of `Methods`, and of torch."""

    supports_coalescing = False  # torch then begins sends and receives one by one, which never wait for each other

    def __init__(self, group: ProcessGroupWorld) -> None:
        Backend.__init__(self, group.world.rank, group.world.size)
        self.group = group
        self.requests = CheckedCalls(group.world.rank, group.world.size)

    def getBackendName(self) -> str:  # noqa: N802  # C++'s name
        """Return the name of the backend."""
        return NAME

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Do `allreduce` of a sparse tensor."""
        return self.allreduce(tensors, opts)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Raise `UsageError`: torch asks the work for its source, which it loses for a backend in Python (2.14)."""
        raise as_dist_error(UsageError("a receive from any rank is not possible with this version of torch: name src"))


def create(options: Any, _: Any = None) -> CommrtBackend:
    """Return the backend that torch asks for in `options`, a ``_DistributedBackendOptions``. Collective."""
    return CommrtBackend(group_of(options))
