# SPDX-License-Identifier: Apache-2.0
"""What `attach` refuses: checks of its arguments and of the model, on one rank.

Each raises `UsageError`; `wire_of` and `optimizers_of` also return what was given in its one form.
Nothing here changes or sends anything. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from commrt.algorithm import Algorithm
from commrt.buckets.dtypes import gradient_dtype, wire_dtype
from commrt.buckets.tensors import Named
from commrt.errors import UsageError
from commrt.runtime.all_reduce_call import is_expanded
from commrt.runtime.wire import AnyWire, as_wire
from commrt.runtime.world import World
from commrt.training.optimizer_steps import attached_params
from commrt.training.parameter_list import EMBEDDINGS

GRADIENTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

GOES_ON_ANEW = "gossip of weights"
"""The trait of algorithms with which a model may be attached after a rank was lost."""


def require_world(world: object) -> None:
    """Refuse what is no world."""
    if world is not None and not isinstance(world, World):
        raise UsageError(
            f"world={world!r:.80} is no world: pass what commrt.init() returned, or leave it out"
        )


def require_open_to_models(world: World) -> None:
    """Refuse a world in ``join()``, and one whose ranks do different numbers of steps."""
    world.require_all_ranks("attach()")
    if world.membership.needed:
        raise UsageError(
            "a model with BackupWorkers is attached to this world, whose ranks do different numbers"
            " of steps: attach both as one, in an nn.ModuleList, or detach() it first"
        )


def require_fitting_world(world: World, algorithm: Algorithm, *, may_grow: bool) -> None:
    """Refuse a world with later ranks unless it `may_grow`, and lost ranks by the algorithm."""
    if world.size > world.founders and not may_grow:
        what = "only to BackupWorkers, LocalSGD and gossip of weights can ranks come later"
        raise UsageError(f"init(up_to={world.size}) and {algorithm}: {what}")
    if world.lost and GOES_ON_ANEW not in getattr(algorithm, "traits", ()):
        raise UsageError(
            f"{world.lost[0]}: only gossip of weights goes on without it where a model is"
            " attached anew: start again"
        )


def require_module(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}: attach() takes a torch.nn.Module first, then"
            " optimizers"
        )


def wire_of(algorithm: Algorithm, named: AnyWire | str | None) -> AnyWire | None:
    """Return the wire that travels: the one `named` here, or the algorithm's."""
    given = as_wire(named)
    own = as_wire(getattr(algorithm, "wire", None))
    if None not in (given, own) and given != own:
        raise UsageError(
            f"wire={given} here and wire={own} in {type(algorithm).__name__}: give it once"
        )
    return given if own is None else own


def require_size(cap_mb: object) -> None:
    """Refuse what is no size of a bucket."""
    if isinstance(cap_mb, bool) or not isinstance(cap_mb, int | float) or not 0 < cap_mb <= 1e9:
        raise UsageError(
            f"bucket_cap_mb={cap_mb!r:.80} must be a positive number of MiB: 25 is a good start"
        )


def require_flags(**flags: object) -> None:
    """Refuse values other than True and False; ``graphs`` may be None."""
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (name, flag) != ("graphs", None):
            raise UsageError(f"{name}={flag!r:.80}: give True or False")


def require_averageable(model: nn.Module, params: Sequence[Named]) -> None:
    """Refuse a model whose gradients cannot be averaged, or whose state cannot be overwritten."""
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel already: attach the bare module"
            " instead"
        )
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "attach() under torch.inference_mode(): call it outside, gradients do not exist there"
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if problem := _problem(tensor):
            raise UsageError(f"{name} {problem}")
    if not params:
        raise UsageError(
            "the model has no parameter that requires a gradient: there is nothing to average"
        )
    for name, param in params:
        if (dtype := gradient_dtype(param)) not in GRADIENTS:
            listed = ", ".join(map(str, GRADIENTS))
            raise UsageError(
                f"{name} has gradients of dtype {dtype}: those of {listed} can be averaged"
            )
    _require_one_device(chain(params, model.named_buffers()))
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged: use"
                " sparse=False"
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


def _require_one_device(tensors: Iterable[tuple[str, Tensor]]) -> None:
    devices = {tensor.device: name for name, tensor in tensors}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UsageError(
            f"the model lies on different devices ({where}): move the model to one device"
        )
    device = next(iter(devices))
    if device.type == "meta":
        raise UsageError(
            "the model is on the meta device, it has no values: use model.to_empty() and"
            " initialise it"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the model is on {device}: this version moves tensors on CPUs and NVIDIA GPUs only"
        )


def require_read_only_forward(model: nn.Module) -> None:
    """Refuse a module of torch whose forward pass writes parameters by what its batch holds."""
    for name, module in model.named_modules():
        place = name or "the model"
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            norm = module.norm_type
            most = module.max_norm
            raise UsageError(
                f"{place} has max_norm={most}: its forward pass rescales the rows that this rank"
                " looks up, so replicas would drift apart. Leave max_norm out, and rescale the"
                " whole table after attach() and after each optimizer.step(): with"
                f" torch.no_grad(): weight.renorm_({norm}, 0, {most})"
            )
        if (
            type(module).__name__ == "_LearnableFakeQuantize"
            and getattr(module, "static_enabled", [0])[0]
        ):
            raise UsageError(
                f"{place} writes its parameters scale and zero_point in forward, from what this"
                " rank's batch holds: call its enable_param_learning() before attach()"
            )


def optimizers_of(given: object, params: Sequence[Named]) -> list[Optimizer]:
    """Return the optimizers that were `given`: none, one or several, which step `params`."""
    found: list[Any] = [given]
    if given is None:
        found = []
    elif isinstance(given, Iterable):
        found = list(given)
    ours = {id(param) for _, param in params}
    for optimizer in found:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"a {kind} was given as the optimizer: pass a torch.optim.Optimizer or a list of"
                " them, and all else by its name (algorithm=, ...)"
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise UsageError(
                f"the {kind} has no hooks for its steps, as its class does not call"
                " Optimizer.__init__: give the optimizer that it wraps"
            )
        if not any(
            id(param) in ours for group in optimizer.param_groups for param in group["params"]
        ):
            raise UsageError(
                f"the {kind} steps no parameter of the model: build it from model.parameters()"
            )
    return found


def require_views(gradients: object, params: Sequence[Named], wire: AnyWire | None) -> None:
    """Refuse an unknown value of `gradients`, and views of what does not travel as it is."""
    if gradients not in ("own", "views"):
        raise UsageError(
            f'gradients={gradients!r:.80}: give "own", or "views" to keep them in what travels'
        )
    if gradients == "own":
        return
    for name, param in params:
        own = gradient_dtype(param)
        travels = wire_dtype(own, wire)
        if own != travels:
            raise UsageError(
                f'gradients="views" needs gradients of the dtype that travels; those of {name} are'
                f" {own} and travel as {travels}: leave out wire= or gradients="
            )


def require_not_attached(params: Sequence[Named]) -> None:
    """Refuse parameters that a replica has already."""
    taken = attached_params()
    for name, param in params:
        if id(param) in taken:
            raise UsageError(
                f"{name} is attached already: detach() the first replica before attaching again"
            )
