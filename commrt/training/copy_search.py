# SPDX-License-Identifier: Apache-2.0
"""Search an optimizer for second copies of its weights, wherever it keeps them; changes nothing.

Nothing in torch marks a copy, so the search goes by values: tensors that are kept alike are copies
if all of them hold their parameters' values. On the thread that trains; a GPU waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DEEPEST = 12
"""Steps from an optimizer to a copy; ``optimizer.inner.state[param]["master"]`` is four away."""
Path = tuple[tuple[bool, Any], ...]
"""How to get from an optimizer to a tensor: (is an attribute, name or key) of each step."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor with the values of `param`, or part of a flat one; looked up anew each time."""

    name: str
    """Equal on all ranks, so without numbers, which may be addresses: two copies may share it."""
    optimizer: Optimizer
    path: Path
    param: Tensor
    begin: int | None = None
    """Where it begins in a flat tensor; None if it is not flat."""

    def tensor(self) -> Tensor | None:
        """Return the copy, in the shape of the parameter; None if it is gone."""
        here: Any = self.optimizer
        try:
            for is_attribute, key in self.path:
                here = getattr(here, key) if is_attribute else here[key]
            here = torch.from_numpy(here) if isinstance(here, np.ndarray) else here.detach()
            if self.begin is not None:
                here = here[self.begin : self.begin + self.param.numel()]
            return here if here.shape == self.param.shape else here.view(self.param.shape)  # type: ignore[no-any-return]
        except (AttributeError, LookupError, TypeError, RuntimeError):
            return None

    @torch.no_grad()
    def stands_for_param(self) -> bool:
        """Return True while the copy is the parameter, but for rounding; a GPU waits."""
        copy = self.tensor()
        if copy is None or not copy.is_floating_point():
            return False
        wide = torch.promote_types(copy.dtype, torch.float32)
        apart = (copy.to(self.param.device, wide) - self.param.to(wide)).norm()
        return bool(apart <= torch.finfo(self.param.dtype).eps * self.param.to(wide).norm())


def copies_in(optimizer: Optimizer, number: int) -> Iterator[Copy]:
    """Yield the copies in `optimizer`, the one with this `number`.

    Tensors that are kept alike, such as ``state[param]["master"]`` of all parameters or the items
    of a list, are copies if all of them hold their parameters' values. So none is taken for one by
    chance.
    """
    own = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]
    numbers = {id(param): i for i, param in enumerate(own)}
    families = defaultdict[tuple[object, ...], list[tuple[Path, Tensor]]](list)
    for path, tensor in _tensors(optimizer, (), {id(optimizer)}):
        if id(tensor) in numbers:
            continue
        # in two families: the items of what holds it, and all that lie at such a place
        keys = [id(key) if isinstance(key, Tensor) else key for _, key in path]
        families["items", *keys[:-1]].append((path, tensor))
        families[tuple("*" if isinstance(key, int) else key for key in keys)].append((path, tensor))
    for family in families.values():
        for path, param, begin in _paired(family, own, numbers):
            names = (str(key) for _, key in path if isinstance(key, str))
            yield Copy(
                f"{number}.{'.'.join(names)} of {numbers[id(param)]}", optimizer, path, param, begin
            )


def _tensors(value: object, path: Path, seen: set[int]) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors that `value` holds, and how to get there."""
    if isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.kind == "f":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        yield path, value
    items: Iterable[tuple[bool, Any, Any]] = ()
    if isinstance(value, dict):
        items = ((False, key, each) for key, each in [*value.items()])
    elif isinstance(value, list | tuple | deque):
        items = ((False, place, each) for place, each in enumerate(value))
    elif isinstance(value, nn.Module):
        items = ((True, name, vars(value)[name]) for name in ("_parameters", "_modules"))
    elif hasattr(value, "__dict__") and not (callable(value) or isinstance(value, ModuleType)):
        items = ((True, name, each) for name, each in [*vars(value).items()])
    for is_attribute, key, each in items:
        if len(path) < DEEPEST and (isinstance(each, Tensor) or id(each) not in seen):
            seen.add(id(each))
            yield from _tensors(each, (*path, (is_attribute, key)), seen)


def _paired(
    family: Sequence[tuple[Path, Tensor]], own: Sequence[Tensor], numbers: Mapping[int, int]
) -> list[tuple[Path, Tensor, int | None]]:
    """Return each path with its parameter if `family` are copies, and its place if flat."""
    narrow = [param for param in own if param.dtype.itemsize < torch.float32.itemsize]
    named = [key for path, _ in family for _, key in path if id(key) in numbers]
    for params in (named,) if named else (own, narrow):
        if pairs := _in_order(family, params):
            return pairs
    return []


def _in_order(
    family: Sequence[tuple[Path, Tensor]], params: Sequence[Tensor]
) -> list[tuple[Path, Tensor, int | None]]:
    """Return the pairs if each of `family` holds the next possible of `params`, or several."""
    pairs: list[tuple[Path, Tensor, int | None]] = []
    next_one = 0
    for path, tensor in family:
        covered: Sequence[Tensor] = ()
        while next_one < len(params) and not covered:
            covered = _covered(tensor, params, next_one)
            next_one += len(covered) or 1
        if not covered:
            return []
        begins = accumulate((param.numel() for param in covered), initial=0)
        is_flat = len(covered) > 1
        pairs += [
            (path, param, begin if is_flat else None)
            for param, begin in zip(covered, begins, strict=False)
        ]
    varied = any(bool((param != param.flatten()[:1]).any()) for _, param, _ in pairs)
    return pairs if varied else []  # many things are all zeros


def _covered(tensor: Tensor, params: Sequence[Tensor], begin: int) -> Sequence[Tensor]:
    """Return the parameters from number `begin` on that `tensor` holds: one, or several if flat."""
    if _is_copy(params[begin], tensor):
        return params[begin : begin + 1]
    if tensor.dim() != 1:
        return ()
    numels = accumulate(param.numel() for param in params[begin:])
    count = next((i for i, numel in enumerate(numels, 1) if numel >= tensor.numel()), 0)
    covered = params[begin : begin + count]
    sizes = [param.numel() for param in covered]
    if not count or sum(sizes) != tensor.numel():
        return ()
    return covered if all(map(_is_copy, covered, torch.split(tensor.detach(), sizes))) else ()


def _is_copy(param: Tensor, tensor: Tensor) -> bool:
    if tensor.numel() != param.numel() or not tensor.is_floating_point():
        return False
    if tensor.is_meta or tensor.data_ptr() == param.data_ptr():
        return False
    ours = param.detach()
    theirs = tensor.detach().to(param.device, param.dtype)
    if ours.shape != theirs.shape:  # one of them is flat
        return theirs.is_contiguous() and torch.equal(theirs.flatten(), ours.flatten())
    return torch.equal(theirs, ours)
