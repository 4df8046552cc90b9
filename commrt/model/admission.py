# SPDX-License-Identifier: Apache-2.0
"""May this model be averaged? All that `attach` refuses before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from commrt.errors import UsageError
from commrt.model.state import Stateful
from commrt.wire.buckets import Named, gradient_dtype, is_expanded

__all__ = [
    "WIRES",
    "check_algorithm",
    "check_cap",
    "check_flags",
    "check_kinds",
    "check_model",
    "check_optimizers",
    "check_stateful",
    "check_wire",
    "describe",
    "describe_buffers",
    "describe_optimizers",
    "have_state",
    "listed",
]

WIRES = (torch.float32, torch.bfloat16, torch.float16)
MOST_MB = 1e9
GRADIENTS = (torch.float64, *WIRES)


def check_kinds(model: object, algorithm: object) -> None:
    """Raise `UsageError` unless `model` and `algorithm` are what their names say."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}: attach() takes a torch.nn.Module first, then optimizers"
        )
    check_algorithm(algorithm)


def check_algorithm(algorithm: object) -> None:
    """Raise `UsageError` unless `algorithm` could be one."""
    if isinstance(algorithm, type) or not callable(getattr(algorithm, "schedule", None)):
        raise UsageError(f"algorithm={algorithm!r:.200} makes no schedules: pass an object, such as commrt.Ring()")


def listed(optimizer: object) -> list[Optimizer]:
    """All that `attach` was given to step the model; raises `UsageError` for anything else."""
    given = optimizer if isinstance(optimizer, Iterable) else [] if optimizer is None else [optimizer]
    found = list(given)
    for thing in found:
        if not isinstance(thing, Optimizer):
            raise UsageError(
                f"a {type(thing).__name__} was given as the optimizer: pass a torch.optim.Optimizer or a list of them, "
                "and all else by its name (algorithm=, ...)"
            )
    return found


def check_wire(wire: torch.dtype | None) -> None:
    """Raise `UsageError` for a dtype that cannot travel."""
    if wire is not None and not (isinstance(wire, torch.dtype) and wire in WIRES):
        raise UsageError(f"wire={wire!s:.80} cannot travel: use {_listed(WIRES)}, or None for each dtype as it is")


def check_cap(bucket_cap_mb: float) -> None:
    """Raise `UsageError` for a bucket that cannot be filled."""
    is_number = isinstance(bucket_cap_mb, int | float) and not isinstance(bucket_cap_mb, bool)
    if not (is_number and 0 < bucket_cap_mb <= MOST_MB):
        raise UsageError(f"bucket_cap_mb={bucket_cap_mb!r:.80} must be a positive number of MiB: 25 is a good start")


def check_flags(**flags: object) -> None:
    """Raise `UsageError` for one of `flags`, by name, that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UsageError(f"{name}={flag!r:.80}: give True or False")


def check_model(model: nn.Module, params: Sequence[Named]) -> None:
    """Raise `UsageError` unless the gradients of `params` can be averaged and all state of `model` overwritten."""
    if isinstance(model, DistributedDataParallel):
        raise UsageError("the model is wrapped in DistributedDataParallel already: attach the bare module instead")
    if torch.is_inference_mode_enabled():
        raise UsageError("attach() under torch.inference_mode(): call it outside, gradients do not exist there")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if complaint := _complaint(tensor):
            raise UsageError(f"{name} {complaint}")
    if not params:
        raise UsageError("the model has no parameter that requires a gradient: there is nothing to average")
    for name, param in params:
        _check_dtype(name, gradient_dtype(param), WIRES if param.is_cuda else GRADIENTS)
    _check_devices(chain(params, model.named_buffers()))
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged: use sparse=False"
            )


def check_optimizers(optimizers: Sequence[Optimizer], params: Sequence[Named]) -> None:
    """Raise `UsageError` for an optimizer that steps none of `params`."""
    ours = {id(param) for _, param in params}
    for optimizer in optimizers:
        if not any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            raise UsageError(
                f"the {type(optimizer).__name__} steps no parameter of the model: build it from model.parameters()"
            )


def check_stateful(owners: Sequence[object], call: str = "join()") -> None:
    """Raise `UsageError` for what has no state to hand over."""
    if not isinstance(owners, Iterable):
        raise UsageError(f"{call} takes a list, not a {type(owners).__name__}: put it into one")
    for owner in owners:
        if not isinstance(owner, Stateful):
            raise UsageError(
                f"{call} was given a {type(owner).__name__}, which has no state_dict() and load_state_dict(): pass "
                "learning rate schedulers, a GradScaler and the like"
            )


def describe_buffers(model: nn.Module) -> str:
    """Names, dtypes and shapes of all buffers, as ranks compare them."""
    return ", ".join(f"{name} {b.dtype}{list(b.shape)}" for name, b in model.named_buffers())


def have_state(optimizers: Sequence[Optimizer]) -> bool:
    """True if one of `optimizers` has stepped; the same on all ranks that agree about `describe_optimizers`."""
    pairs = (
        (param, optimizer) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    )
    return any(param in optimizer.state for param, optimizer in pairs)


def describe_optimizers(optimizers: Sequence[Optimizer], params: Sequence[Named]) -> str:
    """All that decides how `optimizers` step, except the values of their state: types, settings, who has state."""
    names = {id(param): name for name, param in params}
    return "; ".join(chain.from_iterable(_settings(optimizer, names) for optimizer in optimizers))


def describe(thing: object) -> str:
    """`thing` as text, without the address where this process keeps it."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(thing))


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def _settings(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    for group in optimizer.param_groups:
        members = [names.get(id(param), "-") + "*" * (param in optimizer.state) for param in group["params"]]
        values = (
            f"{key}={describe(_plain(value))}" for key, value in group.items() if key not in ("params", "param_names")
        )
        yield f"{type(optimizer).__name__}({', '.join(values)}) of {' '.join(members)}, * has state"


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _complaint(tensor: Tensor) -> str | None:
    """What keeps a parameter or buffer from being overwritten with rank 0's."""
    if is_lazy(tensor):
        return "has no shape yet: run one batch through the model before attach()"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: only dense tensors can be sent"
    if tensor.is_inference():
        return "was made under torch.inference_mode(): make the model outside of it"
    if is_expanded(tensor):
        return "is expanded, several elements share one place in memory: use its .clone()"
    return None


def _check_dtype(name: str, dtype: torch.dtype, offered: Sequence[torch.dtype]) -> None:
    if dtype not in offered:
        raise UsageError(f"{name} has gradients of dtype {dtype}: those of {_listed(offered)} can be averaged there")


def _check_devices(tensors: Iterable[tuple[str, Tensor]]) -> None:
    devices: dict[torch.device, str] = {}
    for name, tensor in tensors:
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UsageError(f"the model lies on different devices ({where}): move the model to one device")
    device = next(iter(devices))
    if device.type == "meta":
        raise UsageError("the model is on the meta device, it has no values: use model.to_empty() and initialise it")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device}: this version moves tensors on CPUs and NVIDIA GPUs only")
