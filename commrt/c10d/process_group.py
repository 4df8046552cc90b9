# SPDX-License-Identifier: Apache-2.0
"""The process group that torch 2.13 and earlier get from ``init_process_group("commrt")``.

This file goes when torch 2.13 is no longer supported, with `observed_ops` and `out_gather`: 2.14
gets `commrt.c10d.backend` instead. torch calls its methods in Python, and all runs on the thread
that calls. C++ and ``torch.ops.c10d`` want a backend in C++ behind a group, which cannot be written
in Python: they find the Gloo that carries the group's messages between CPU tensors. Importing this
registers a kernel with torch, for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from commrt.c10d.devices import group_devices, use_backend
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.methods import Methods
from commrt.c10d.name import NAME
from commrt.c10d.observed_ops import through_op
from commrt.c10d.out_gather import gather_with
from commrt.errors import UsageError


class CommrtProcessGroup(Methods, ProcessGroup):  # type: ignore[misc]  # of torch's overloads, we take one
    """A process group whose collectives run proven schedules, by the methods of `Methods`.

    It is also what torch gets where it asks for the backend of a device. What is defined neither
    here nor there is Gloo's answer. Fields are set when it is made, `_plain` by the first call that
    is observed.
    """

    supports_splitting = False  # Gloo does

    def __init__(self, options: Any) -> None:
        ProcessGroup.__init__(self, options.group_rank, options.group_size)  # type: ignore[call-arg]  # the stub lacks it
        self.group = ProcessGroupWorld(options)
        self.group.close_with(self)
        self._gloo = self.group.gloo.process_group
        use_backend(self, self._gloo)

    def observed(self, name: str, given: Sequence[Any], begin: Callable[[], Any]) -> Any:
        """Do ``begin()`` where a profiler or mode sees it; of a sparse tensor, its parts."""
        tensors = given[0] if given else None
        if (
            isinstance(tensors, list)
            and tensors
            and isinstance(tensors[0], Tensor)
            and tensors[0].is_sparse
        ):
            return begin()
        return through_op(self._plain, name, given, begin)

    @cached_property
    def _plain(self) -> ProcessGroup:
        """A group whose methods call torch's ops. It has no backend."""
        plain = ProcessGroup(self.group.store, self.rank(), self.size())
        plain._set_group_name(self.group_name)  # noqa: SLF001
        return plain

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device) in group_devices() else super()._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 0."""

    def get_group_store(self) -> Store:
        """Return the store in which the ranks of the group found each other."""
        return self.group.store

    def split_group(self, *_: Any, **__: Any) -> ProcessGroup:
        """Raise `UsageError`: torch would make a group of Gloo."""
        raise as_dist_error(
            UsageError("a group of commrt cannot be split: call torch.distributed.new_group")
        )

    merge_remote_group = split_group

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815  # C++ calls this one
    _set_default_timeout = Methods.set_timeout


# torch's compiler takes no __getattr__
for _name in {*dir(ProcessGroupGloo)} - {*dir(CommrtProcessGroup)}:
    setattr(CommrtProcessGroup, _name, property(attrgetter(f"_gloo.{_name}")))

_kernel = gather_with(CommrtProcessGroup)
"""Registered with torch for as long as this object lives: that of this module."""
