# SPDX-License-Identifier: Apache-2.0
"""Refuse what cannot be averaged: models and arguments in `attach`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from commrt.buckets.layout import Named, gradient_dtype, wire_dtype
from commrt.errors import UsageError
from commrt.options import require_compatible
from commrt.runtime.collectives import check_algorithm, is_expanded
from commrt.runtime.wire import AnyWire, check_wire
from commrt.training.model_state import Stateful

__all__ = [
    "check_attach",
    "check_stateful",
    "comparable",
    "describe_buffers",
    "describe_optimizers",
    "require_read_only_forward",
    "wants_views",
]

MOST_MB = 1e9
GRADIENTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_attach(
    model: object,
    optimizer: object,
    algorithm: object,
    wire: AnyWire | None,
    cap_mb: object,
    gradients: object,
    flags: Mapping[str, object],
) -> tuple[list[Named], list[Optimizer], AnyWire | None]:
    """Return the parameters to average, the optimizers and what travels; raises `UsageError` for what cannot work."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}: attach() takes a torch.nn.Module first, then optimizers"
        )
    check_algorithm(algorithm)
    own: AnyWire | None = getattr(algorithm, "wire", None)  # an algorithm may say what travels
    if None not in (wire, own) and wire != own:
        raise UsageError(f"wire={wire} here and wire={own} in {type(algorithm).__name__}: give it once")
    wire = wire if own is None else own
    check_wire(wire)
    chosen = {
        "graphs": flags["graphs"] is True,
        "views": gradients == "views",
        "no optimizer": optimizer is None,
        "same bits": flags["same_bits"] is True,
    }
    require_compatible(algorithm, wire, [name for name, is_chosen in chosen.items() if is_chosen])
    if isinstance(cap_mb, bool) or not isinstance(cap_mb, int | float) or not 0 < cap_mb <= MOST_MB:
        raise UsageError(f"bucket_cap_mb={cap_mb!r:.80} must be a positive number of MiB: 25 is a good start")
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (name, flag) != ("graphs", None):
            raise UsageError(f"{name}={flag!r:.80}: give True or False")
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    _check_model(model, params)
    return params, _checked_optimizers(optimizer, params), wire


def wants_views(gradients: object, params: Sequence[Named], wire: AnyWire | None) -> bool:
    """Return True for ``gradients="views"``; raises `UsageError` where they cannot be views of what travels."""
    if gradients not in ("own", "views"):
        raise UsageError(f'gradients={gradients!r:.80}: give "own", or "views" to keep them in what travels')
    if gradients == "own":
        return False
    for name, param in params:
        own, travels = gradient_dtype(param), wire_dtype(gradient_dtype(param), wire)
        if own != travels:
            raise UsageError(
                f'gradients="views" needs gradients of the dtype that travels; those of {name} are {own} and travel as '
                f"{travels}: leave out wire= or gradients="
            )
    return True


def _checked_optimizers(given: object, params: Sequence[Named]) -> list[Optimizer]:
    found = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
    ours, optimizers = {id(param) for _, param in params}, []
    for optimizer in found:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"a {kind} was given as the optimizer: pass a torch.optim.Optimizer or a list of them, and all else by "
                "its name (algorithm=, ...)"
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise UsageError(
                f"the {kind} has no hooks for its steps, as its class does not call Optimizer.__init__: give the "
                "optimizer that it wraps"
            )
        if not any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            raise UsageError(f"the {kind} steps no parameter of the model: build it from model.parameters()")
        optimizers.append(optimizer)
    return optimizers


def check_stateful(owners: Sequence[object], call: str = "join()") -> None:
    """Raise `UsageError` for an object without a state to send, given to `call`."""
    if not isinstance(owners, Iterable):
        raise UsageError(f"{call} takes a list, not a {type(owners).__name__}: put it into one")
    for owner in owners:
        if not isinstance(owner, Stateful):
            raise UsageError(
                f"{call} was given a {type(owner).__name__}, which has no state_dict() and load_state_dict(): pass "
                "learning rate schedulers, a GradScaler and the like"
            )


def _check_model(model: nn.Module, params: Sequence[Named]) -> None:
    """Raise `UsageError` unless the gradients of `params` can be averaged and all state of `model` overwritten."""
    if isinstance(model, DistributedDataParallel):
        raise UsageError("the model is wrapped in DistributedDataParallel already: attach the bare module instead")
    if torch.is_inference_mode_enabled():
        raise UsageError("attach() under torch.inference_mode(): call it outside, gradients do not exist there")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if problem := _problem(tensor):
            raise UsageError(f"{name} {problem}")
    if not params:
        raise UsageError("the model has no parameter that requires a gradient: there is nothing to average")
    for name, param in params:
        if (dtype := gradient_dtype(param)) not in GRADIENTS:
            listed = ", ".join(map(str, GRADIENTS))
            raise UsageError(f"{name} has gradients of dtype {dtype}: those of {listed} can be averaged")
    _check_devices(chain(params, model.named_buffers()))
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged: use sparse=False"
            )


def require_read_only_forward(model: nn.Module) -> None:
    """Raise `UsageError` for a module of torch whose forward pass writes parameters, by what is in a rank's batch."""
    for name, module in model.named_modules():
        place = name or "the model"
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            norm, most = module.norm_type, module.max_norm
            raise UsageError(
                f"{place} has max_norm={most}: its forward pass rescales the rows that this rank looks up, so replicas "
                "would drift apart. Leave max_norm out, and rescale the whole table after attach() and after each "
                f"optimizer.step(): with torch.no_grad(): weight.renorm_({norm}, 0, {most})"
            )
        if type(module).__name__ == "_LearnableFakeQuantize" and getattr(module, "static_enabled", [0])[0]:
            raise UsageError(
                f"{place} writes its parameters scale and zero_point in forward, from what this rank's batch holds: "
                "call its enable_param_learning() before attach()"
            )


def _problem(tensor: Tensor) -> str | None:
    """Return what keeps a parameter or buffer from being overwritten with rank 0's."""
    if is_lazy(tensor):
        return "has no shape yet: run one batch through the model before attach()"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: only dense tensors can be sent"
    if tensor.is_inference():
        return "was made under torch.inference_mode(): make the model outside of it"
    if is_expanded(tensor):
        return "is expanded, several elements share one place in memory: use its .clone()"
    return None


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


def comparable(value: object) -> str:
    """Return `value` as text that ranks can compare: without the places where a process keeps objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def describe_buffers(model: nn.Module) -> str:
    """Return names, dtypes and shapes of all buffers, as ranks compare them."""
    return ", ".join(f"{name} {b.dtype}{list(b.shape)}" for name, b in model.named_buffers())


def describe_optimizers(optimizers: Sequence[Optimizer], params: Sequence[Named]) -> str:
    """Return all that decides how `optimizers` step, but the values of their state: types, settings, who has state."""
    names, groups = {id(param): name for name, param in params}, []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [names.get(id(param), "-") + "*" * (param in optimizer.state) for param in group["params"]]
            settings = ", ".join(
                f"{key}={comparable(value.tolist() if isinstance(value, Tensor) else value)}"
                for key, value in group.items()
                if key not in ("params", "param_names")
            )
            groups.append(f"{type(optimizer).__name__}({settings}) of {' '.join(members)}, * has state")
    return "; ".join(groups)
