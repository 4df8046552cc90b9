# SPDX-License-Identifier: Apache-2.0
"""Collectives called through torch's ops, where dispatch modes and torch's profiler see them.

For torch 2.13 and earlier: they see ops, and a call of a Python method is none. So an observed call
passes the op ``torch.ops.c10d`` of its collective, under a dispatch key of which no build of torch
has tensors: the kernel there does what the method does. All runs on the thread that calls. The
first observed call registers the kernels with torch, for the whole process; until then, and for
calls that nobody observes, nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves

KEY = "FPGA"
"""Comes after the keys of modes, and before those of devices.

All ops but those of `_register` fall through it.
"""
_library: Any = Library  # which has no types

_observed: ContextVar[tuple[ProcessGroup, Callable[[], Any]] | None] = ContextVar(
    "observed", default=None
)
"""The plain group whose op is called, and what its kernel does: set during `through_op` only."""


def through_op(
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
    """Let ops of this thread go to the kernels of `KEY`, or past them; as before at the end."""
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
    """Do what `through_op` was given, if its group is argument `place`; otherwise torch's `op`."""
    observed = _observed.get()
    is_meta = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(given[0]))
    with _key(included=False):
        if observed is None or is_meta or ProcessGroup.unbox(given[place]) is not observed[0]:
            return op(*given)
        work = observed[1]()
    returned = len(op._schema.returns)  # noqa: SLF001  # the work, and what holds the result
    boxed = work.boxed() if returned else None
    return (given[0], boxed) if returned > 1 else boxed
