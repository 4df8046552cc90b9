# SPDX-License-Identifier: Apache-2.0
"""The process group that torch 2.13 and earlier get from ``init_process_group("commrt")``.

This file goes when torch 2.13 is no longer supported: 2.14 gets `commrt.c10d.backend` instead.

torch calls its methods in Python. C++ and ``torch.ops.c10d`` want a backend in C++ behind a group,
which cannot be written in Python: they find the Gloo that carries the group's messages between CPU
tensors.

Dispatch modes and the profiler of torch see ops, and a call of a Python method is none. So an
observed call passes the op ``torch.ops.c10d`` of its collective, under a dispatch key of which no
build of torch has tensors: the kernel there does what the method does. Calls that nobody observes,
and those of other groups, never come here. All runs on the thread that calls. The kernels, and one
for ``all_gather_into_tensor_out``, are registered with torch for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves

from commrt.c10d.devices import group_devices, use_backend
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.group import ProcessGroupWorld
from commrt.c10d.methods import Methods
from commrt.c10d.name import NAME
from commrt.errors import UsageError

KEY = "FPGA"
"""Comes after the keys of modes, and before those of devices.

All ops but those below fall through it.
"""
TORCH_S_KEY = DispatchKey.CompositeExplicitAutograd
"""Of torch's own kernel, in an op that has one for all devices."""
_library: Any = Library  # which has no types


class CommrtProcessGroup(Methods, ProcessGroup):  # type: ignore[misc]  # of torch's overloads, we take one
    """A process group whose collectives run proven schedules. Its methods are those of `Methods`
    and of torch.

    It is also what torch gets where it asks for the backend of a device. What is not defined here
    is Gloo's answer.
    """

    supports_splitting = False  # Gloo does

    def __init__(self, options: Any) -> None:
        group = ProcessGroupWorld(options)
        ProcessGroup.__init__(self, options.group_rank, options.group_size)  # type: ignore[call-arg]  # the stub lacks it
        self.group = group
        group.close_with(self)
        self._gloo = group.gloo.process_group
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
        return _through_op(self._plain, name, given, begin)

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


_observed: ContextVar[tuple[ProcessGroup, Callable[[], Any]] | None] = ContextVar(
    "observed", default=None
)
"""The plain group whose op is called, and what its kernel does."""


def _through_op(
    group: ProcessGroup, name: str, given: Sequence[Any], begin: Callable[[], Any]
) -> Any:
    """Return what `begin` returns, called by the op of the method `name` of a plain `group`.

    A mode that keeps the op from its kernel, as that of fake tensors does, decides what is returned
    instead.
    """
    _register()
    outcome: list[Any] = []

    def kept() -> Any:
        outcome.append(begin())
        return outcome[0]

    token = _observed.set((group, kept))
    try:
        with _key(included=True):
            other = getattr(group, name)(*[each for each in given if each is not None])
    finally:
        _observed.reset(token)
    return outcome[0] if outcome else other


@contextmanager
def _key(*, included: bool) -> Iterator[None]:
    before = torch._C._dispatch_tls_is_dispatch_key_included(KEY)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, included)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, before)  # noqa: SLF001


@cache
def _register() -> list[Any]:
    """Register the kernels, and return what keeps them registered."""
    rest = _library("_", "IMPL")
    ops = _library("c10d", "IMPL")
    rest.fallback(fallthrough_kernel, KEY)
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]  # noqa: SLF001
    for name in names:
        op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
        arguments = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
        if "process_group" in arguments:
            ops.impl(name, partial(_kernel, op, arguments.index("process_group")), KEY)
    return [rest, ops]


def _kernel(op: Any, place: int, *given: Any) -> Any:
    observed = _observed.get()
    is_meta = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(given[0]))
    with _key(included=False):
        if observed is None or is_meta or ProcessGroup.unbox(given[place]) is not observed[0]:
            return op(*given)
        work = observed[1]()
    returned = len(op._schema.returns)  # noqa: SLF001  # the work, and what holds the result
    boxed = work.boxed() if returned else None
    return (given[0], boxed) if returned > 1 else boxed


def _gather_with(kind: type[ProcessGroup]) -> Any:
    """Let ``all_gather_into_tensor_out``, which asks backends in C++, ask groups of a `kind`."""
    op = torch.ops._c10d_functional.all_gather_into_tensor_out.default  # noqa: SLF001

    def gathered(source: Tensor, size: int, given: Any, *, out: Tensor) -> Any:
        # both occur in 2.13
        group = _resolve_process_group(cast("Any", given)) if isinstance(given, str) else given
        if not isinstance(group, kind):
            return op._op_dk(TORCH_S_KEY, source, size, given, out=out)  # noqa: SLF001
        # it lives as long as C++ needs it
        work = ProcessGroup.allgather_into_tensor_coalesced(group, [out], [source])
        _register_work(out, work)
        return out

    library = _library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", gathered, key)
    return library


_registered = _gather_with(CommrtProcessGroup)
