# SPDX-License-Identifier: Apache-2.0
"""torch's own ops, for process groups written in Python (torch 2.13 and earlier).

Dispatch modes and the profiler of torch see ops, and a call of a Python method is none. So an observed call passes the
op ``torch.ops.c10d`` of its collective, under a dispatch key of which no build of torch has tensors: the kernel there
does what the method does. Calls that nobody observes, and those of other groups, never come here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.distributed import ProcessGroup, Store
from torch.library import Library, fallthrough_kernel

__all__ = ["gather_with", "plain_group", "through_op"]

KEY = "FPGA"
"""Comes after the keys of modes, and before those of devices. All ops but those below fall through it."""
TORCH_S_KEY = DispatchKey.CompositeExplicitAutograd
"""Of torch's own kernel, in an op that has one for all devices."""


@dataclass(slots=True)
class _Call:
    group: ProcessGroup
    begin: Callable[[], Any]
    outcome: Any = None
    is_done: bool = False


class _Local(threading.local):
    call: _Call | None = None


_local = _Local()


def plain_group(store: Store, rank: int, size: int, name: Any) -> ProcessGroup:
    """Return a group whose methods call torch's ops, for `through_op`. It has no backend."""
    group = ProcessGroup(store, rank, size)
    group._set_group_name(name)  # noqa: SLF001
    return group


def through_op(group: ProcessGroup, name: str, given: Sequence[Any], begin: Callable[[], Any]) -> Any:
    """Return what `begin` returns, called by the op that the method `name` of a plain `group` calls.

    A mode that keeps the op from its kernel, as that of fake tensors does, decides what is returned instead.
    """
    _register()
    call, outer = _Call(group, begin), _local.call
    _local.call = call
    try:
        with _key(included=True):
            other = getattr(group, name)(*[each for each in given if each is not None])
    finally:
        _local.call = outer
    return call.outcome if call.is_done else other


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
    rest, ops = _library("_"), _library("c10d")
    rest.fallback(fallthrough_kernel, KEY)
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]  # noqa: SLF001
    for name in names:
        op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
        arguments = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
        if "process_group" in arguments:
            ops.impl(name, partial(_kernel, op, arguments.index("process_group")), KEY)
    return [rest, ops]


def _kernel(op: Any, place: int, *given: Any) -> Any:
    call = _local.call
    with _key(included=False):
        is_ours = call is not None and ProcessGroup.unbox(given[place]) is call.group
        if call is None or not is_ours or _is_meta(given):
            return op(*given)
        call.outcome, call.is_done = call.begin(), True
    returned = len(op._schema.returns)  # noqa: SLF001  # the work, and what holds the result
    work = call.outcome.boxed() if returned else None
    return (given[0], work) if returned > 1 else work


def _is_meta(given: Sequence[Any]) -> bool:
    first = given[0]
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Tensor) and first.is_meta


def _library(namespace: str) -> Any:
    """Return what registers kernels, for as long as it is referenced."""
    return Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def gather_with(kind: type[ProcessGroup]) -> Any:
    """Let ``all_gather_into_tensor_out``, of which torch asks a backend in C++, ask groups of a `kind` in Python."""
    op = torch.ops._c10d_functional.all_gather_into_tensor_out.default  # noqa: SLF001

    def gathered(source: Tensor, size: int, group_name: Any, *, out: Tensor) -> Any:
        group = _resolved(group_name)
        if not isinstance(group, kind):
            return op._op_dk(TORCH_S_KEY, source, size, group_name, out=out)  # noqa: SLF001
        work = ProcessGroup.allgather_into_tensor_coalesced(group, [out], [source])  # it lives as long as C++ needs it
        torch._C._distributed_c10d._register_work(out, work)  # noqa: SLF001
        return out

    library = _library("_c10d_functional")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", gathered, key)
    return library


def _resolved(group: str | ProcessGroup) -> ProcessGroup:
    """Return the group of a name; torch 2.13 may give the group itself."""
    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(cast("Any", group))  # noqa: SLF001
    return group
