# SPDX-License-Identifier: Apache-2.0
"""Short forms of calls, such as ``pg.allreduce(tensor, op)``, as long ones with options.

Pure functions. They look at the form only; `commrt.c10d.checked_calls` checks what is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from commrt.errors import UsageError

FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""What a short form says, and the field of an options object that says it."""
AllgatherOptions: Any = _distributed_c10d.AllgatherOptions


class Form(NamedTuple):
    """The arguments of a method: with tensors or sizes, then options or what stands for them."""

    data: int
    options: Any
    short: tuple[str, ...] = ()


_GATHER = Form(2, AllgatherOptions)
_SCATTER = Form(2, dist.ReduceScatterOptions)
FORMS = {
    "allreduce": Form(1, dist.AllreduceOptions, ("op", "timeout")),
    "allreduce_coalesced": Form(1, dist.AllreduceCoalescedOptions),
    "broadcast": Form(1, dist.BroadcastOptions, ("root", "timeout")),
    "reduce": Form(1, dist.ReduceOptions, ("root", "op", "timeout")),
    "allgather": Form(2, AllgatherOptions, ("timeout",)),
    "allgather_coalesced": _GATHER,
    "all_gather_single": _GATHER,
    "all_gather_single_coalesced": _GATHER,
    "gather": Form(2, dist.GatherOptions, ("root", "timeout")),
    "scatter": Form(2, dist.ScatterOptions, ("root", "timeout")),
    "reduce_scatter": Form(2, dist.ReduceScatterOptions, ("op", "timeout")),
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER,
    "alltoall": Form(2, dist.AllToAllOptions, ("timeout",)),
    "all_to_all_single": Form(4, dist.AllToAllOptions, ("timeout",)),
    "barrier": Form(0, dist.BarrierOptions, ("timeout",)),
}
"""Of the methods that have options, by name."""
OPTIONS = frozenset(form.options for form in FORMS.values())
LISTED = frozenset(
    {"allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter"}
)
"""Methods whose long form has a list of all devices' tensors where the short one has a tensor."""
_MISSING: Any = object()


def long_form(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of the long form of the method `name`: data, then an options object.

    `given` and `named` are arguments of any form that torch knows, with the names that any version
    of torch gave them. Raises `UsageError` for others.
    """
    form = FORMS[name]
    data = [*given[: form.data], *[_MISSING] * (form.data - len(given))]
    rest = [*given[form.data :]]
    said = dict[str, Any]()
    for key, value in named.items():
        if key in FIELDS or key == "opts":
            said[key] = value
            continue
        place = _place(key)
        if place >= form.data or data[place] is not _MISSING:
            raise UsageError(f"{name} has no argument {key}, or got it twice")
        data[place] = value
    if any(each is _MISSING for each in data):
        raise UsageError(f"{name} takes {form.data} arguments before its options: give them all")
    if rest and rest[0].__class__ in OPTIONS:
        said["opts"], *rest = rest
    said |= zip(form.short, rest, strict=False)
    if len(rest) > len(form.short) or said.keys() - {"opts", *form.short}:
        raise UsageError(
            f"{name} takes an options object, or {form.short or 'nothing'} in its place: give one"
            " of these"
        )
    if name in LISTED and any(isinstance(each, Tensor) for each in data):
        data = [[each] for each in data]
    return [*data, _options(name, form, said)]


def _place(key: str) -> int:
    """Return which of a method's arguments with data is called `key`, in any version of torch."""
    side = 1 if key.lower().startswith("input") else 0
    return side + 2 if "split" in key else side


def _options(name: str, form: Form, said: Mapping[str, Any]) -> Any:
    opts = said.get("opts")
    if opts is not None:
        return opts
    opts = form.options()
    for key, value in said.items():
        if value is not None:
            try:
                setattr(opts, FIELDS[key], value)
            except TypeError as error:
                raise UsageError(
                    f"{name} got {value!r} as its {key}, which torch does not take for one"
                ) from error
    return opts
