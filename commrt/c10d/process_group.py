# SPDX-License-Identifier: Apache-2.0
"""The process group that torch 2.13 gets from ``init_process_group("commrt")``.

torch calls its methods in Python. C++ and ``torch.ops.c10d`` want a backend in C++ behind a group, which cannot be
written in Python: they find one of Gloo, which connects two ranks when they first exchange through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group import ProcessGroupWorld, group_of
from commrt.c10d.group_work import as_dist_error
from commrt.c10d.methods import NAME, Methods
from commrt.c10d.torch_ops import gather_with, plain_group, through_op
from commrt.errors import UsageError

__all__ = ["CommrtProcessGroup", "create"]

DEVICES = [torch.device(kind) for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])]


class CommrtProcessGroup(Methods, ProcessGroup):  # type: ignore[misc]  # of torch's overloads, we take one
    """A process group whose collectives run proven schedules. Its methods are those of `Methods` and of torch.

    It is also what torch gets where it asks for the backend of a device. What is not defined here is Gloo's answer.
    """

    supports_splitting = False  # Gloo does

    def __init__(self, group: ProcessGroupWorld) -> None:
        ProcessGroup.__init__(self, group.world.rank, group.world.size)  # type: ignore[call-arg]  # the stub lacks it
        self.group = group
        self.requests = CheckedCalls(group.world.rank, group.world.size)
        self._names = {"name": "", "desc": ""}
        self._gloo = group.open_gloo()
        self._plain: ProcessGroup | None = None
        for device in DEVICES:
            self._register_backend(device, ProcessGroup.BackendType.CUSTOM, self._gloo.process_group)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    def observed(self, name: str, given: Sequence[Any], begin: Callable[[], Any]) -> Any:
        """Do ``begin()`` where a profiler or a mode of torch sees it; of a sparse tensor, they see its parts."""
        tensors = given[0] if given else None
        if isinstance(tensors, list) and tensors and isinstance(tensors[0], torch.Tensor) and tensors[0].is_sparse:
            return begin()
        if self._plain is None:
            self._plain = plain_group(self.group.store, self.rank(), self.size(), self.getGroupName())
        return through_op(self._plain, name, given, begin)

    def _get_backend(self, device: torch.device) -> Any:
        """Return what runs the collectives of a device: this group, which takes CPUs and NVIDIA GPUs."""
        return self if torch.device(device) in DEVICES else super()._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun."""
        return self.group.engine.begun

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 0."""

    def get_group_store(self) -> dist.Store:
        """Return the store in which the ranks of the group found each other."""
        return self.group.store

    def split_group(self, *_: Any, **__: Any) -> ProcessGroup:
        """Raise `UsageError`: torch would make a group of Gloo."""
        raise as_dist_error(UsageError("a group of commrt cannot be split: call torch.distributed.new_group"))

    merge_remote_group = split_group

    def size(self) -> int:
        """Return the number of ranks."""
        return self.requests.size

    def rank(self) -> int:
        """Return this rank in the group."""
        return self.requests.rank

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815  # C++ calls this one

    def getGroupName(self) -> str:  # noqa: N802  # C++'s names, here and below
        """Return the name that torch gave the group."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives the group."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch gave the group."""
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take the description that torch gives the group."""
        self._names["desc"] = desc

    _set_default_timeout = Methods.set_timeout


_registered = gather_with(CommrtProcessGroup)


def _answer_of_gloo(name: str) -> property:
    return property(lambda group: getattr(group._gloo.process_group, name))  # noqa: SLF001  # of this module


for _name in {*dir(ProcessGroupGloo)} - {*dir(CommrtProcessGroup)}:  # torch's compiler takes no __getattr__
    setattr(CommrtProcessGroup, _name, _answer_of_gloo(_name))


def create(options: Any, _: Any = None) -> CommrtProcessGroup:
    """Return the process group that torch asks for in `options`, a ``_DistributedBackendOptions``. Collective."""
    return CommrtProcessGroup(group_of(options))
