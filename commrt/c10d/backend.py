# SPDX-License-Identifier: Apache-2.0
"""The backend that torch 2.14 and on get from ``init_process_group("commrt")``.

Made and called on the threads of the caller. `Methods` has its collectives, its `group` all that
they use. If the object here is dropped, a thread of `commrt.c10d.group` ends that.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.methods import Methods, collective
from commrt.c10d.name import NAME
from commrt.errors import UsageError


class CommrtBackend(Methods, Backend):
    """One per process group and device.

    Each property that torch's C++ reads must stand in this class. It would ask the one that is
    inherited, which asks C++ again, until the stack is full: Python 3.13 ends in SIGSEGV then.
    torch 2.15 reads `options` in each new group.
    """

    # torch then begins sends and receives one by one, which never wait for each other
    supports_coalescing = False

    def __init__(self, options: Any) -> None:
        Backend.__init__(self, options.group_rank, options.group_size)
        self.group = ProcessGroupWorld(options)
        self.group.close_with(self)
        self._use_options(options)

    def _use_options(self, options: Any) -> None:
        """Set what `options` returns; each constructor, also a subclass's own, calls it once."""
        self._options = cast("Any", Backend).Options(NAME, options.timeout)
        self._options.global_ranks_in_group = list(options.global_ranks_in_group) or list(
            range(options.group_size)
        )

    @property
    def options(self) -> Any:
        """What the group was made with, for torch's flight recorder."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802  # C++'s name
        """Return the name of the backend."""
        return NAME

    allreduce_sparse = Methods.allreduce

    @collective("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Raise `UsageError`: for a backend in Python torch loses the work's source (2.14)."""
        raise UsageError(
            "a receive from any rank is not possible with this version of torch: name src"
        )


for _name, _value in vars(Backend).items():
    # of all that a version of torch asks for, in this class for the reason that its docstring has
    if isinstance(_value, property) and "supports_" in _name:
        setattr(CommrtBackend, _name, False)
