# SPDX-License-Identifier: Apache-2.0
"""Attach a model: the entry point for custom training loops, what it refuses, and what every way to
train does then.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from commrt.algorithms.parts import require_maker
from commrt.algorithms.torus import Torus2D
from commrt.buckets.gradient_bucket import GradientBucket, build_buckets
from commrt.buckets.layout import MIB, Named, gradient_dtype, wire_dtype
from commrt.buckets.view_bucket import ViewBucket
from commrt.errors import UsageError
from commrt.options import require_compatible
from commrt.runtime.all_reduce_call import is_expanded
from commrt.runtime.init import current
from commrt.runtime.wire import AnyWire, check_wire
from commrt.runtime.world import World
from commrt.schedule import SYNCHRONOUS, Algorithm, Schedule
from commrt.store.agreement import WorldConfig
from commrt.store.client import host_identity
from commrt.store.launcher import chosen_transport
from commrt.training.loss_scale import LossScales
from commrt.training.model_state import Stateful, overwrite_states
from commrt.training.parameter_list import EMBEDDINGS
from commrt.training.replica import Replica
from commrt.training.step_guard import attached_params
from commrt.training.weight_copies import WeightCopies

GRADIENTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

TAKE_LATER_RANKS = (
    "commrt.backup_workers.backup_replica",
    "commrt.local_sgd.local_replica",
    "commrt.training.gossip",
)
"""What trains models to which ranks may come."""


class _Described(Protocol):
    def description(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `attach`."""

    world: World
    model: nn.Module
    params: Sequence[Named]
    optimizers: Sequence[Optimizer]
    also: Sequence[Stateful]
    algorithm: Algorithm
    wire: AnyWire | None
    cap_nbytes: int
    kind: type[GradientBucket]
    broadcast_buffers: bool
    graphs: bool | None
    same_bits: bool
    watch: bool
    scales: LossScales
    copies: WeightCopies

    def build_buckets(self, params: Sequence[Named]) -> list[GradientBucket]:
        """Return buckets for `params`, given in ready order."""
        world = self.world
        allocate = self.world.transport.allocate_shared
        rows = (params, self.wire, self.cap_nbytes)
        riding = (world.rank, world.size)
        buckets = build_buckets(*rows, world.attached, allocate, kind=self.kind, riding=riding)
        for bucket in buckets:
            bucket.own_settings = self._own_settings
        return buckets

    def _own_settings(self) -> str:
        rates = [
            f"lr={group['lr']:g}"
            for each in self.optimizers
            for group in each.param_groups
            if "lr" in group
        ]
        return ", ".join([*rates, str(self.scales)] if self.scales.known else rates)

    def require_nobody_lost(self) -> None:
        """Raise `UsageError` in a world that has lost a rank."""
        if self.world.lost:
            raise UsageError(
                f"{self.world.lost[0]}: only gossip of weights goes on without it where a model is"
                " attached anew: start again"
            )

    def claim(self, schedule: Schedule, buckets: Iterable[_Described]) -> dict[str, str]:
        """Return what must be equal on all ranks and cannot change afterwards."""
        counts = [
            (each, [len(group["params"]) for group in each.param_groups])
            for each in self.optimizers
        ]
        return {
            "algorithm": _comparable(repr(self.algorithm)),
            "schedule": schedule.digest(),
            "buckets": "; ".join(bucket.description() for bucket in buckets),
            "buffers": describe_buffers(self.model),
            "optimizers": ", ".join(
                f"{type(each).__name__} of {count} parameters" for each, count in counts
            ),
            "kinds in also=": ", ".join(type(each).__name__ for each in self.also),
            "second copies of weights": f"{len(self.copies.found)} in the optimizers",
            "watch": str(self.watch),
        }

    def agree(self, claim: dict[str, str]) -> None:
        """Raise `DisagreementError` unless all ranks come with the same `claim` and the same
        optimizers.
        """
        optimizer = _describe_optimizers(self.optimizers, self.params)
        self.world.agree("attach", model=str(self.world.attached), optimizer=optimizer, **claim)

    def publish(self, claim: dict[str, str]) -> None:
        """Let later processes come to this model, if they make the same `claim`."""
        world = self.world
        host = host_identity() if world.transport.one_host else None
        config = WorldConfig(
            world.founders, world.size, host, world.attached, claim, chosen_transport()
        )
        config.publish(world.store)

    def begin(self, replica: Replica) -> Replica:
        """Give all ranks rank 0's state; detaches the replica if that fails."""
        try:
            replica.overwrite_with_first()
            groups = [(each, group) for each in self.optimizers for group in each.param_groups]
            have_state = any(
                param in each.state for each, group in groups for param in group["params"]
            )
            # the same ones, as ranks have agreed
            owners = [*self.optimizers, *self.also] if have_state else self.also
            self.world.membership.together(lambda: overwrite_states(self.world, owners, 0))
        except BaseException:
            replica.detach()
            raise
        return replica


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector: all that `attach` makes stays, and scanning it again took a third of the
    time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_garbage_collection()
def attach(  # noqa: PLR0913  # each has its default
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    algorithm: Algorithm = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: AnyWire | None = None,
    bucket_cap_mb: float = 25.0,
    gradients: Literal["own", "views"] = "own",
    broadcast_buffers: bool = True,
    graphs: bool | None = None,
    same_bits: bool = False,
    watch: bool = False,
    also: Sequence[Stateful] = (),
) -> Replica:
    """Make `model` one replica of a world: from now on ``backward()`` averages its gradients over
    all ranks.

    Collective. All ranks begin with rank 0's parameters, buffers and optimizer state. During each
    backward pass buckets leave on the communication thread as their gradients become ready.
    ``backward()`` returns when all are averaged, in place in ``param.grad``; leave them alone until
    then. The hooks live as long as the model, or until `Replica.detach`.

    - `optimizer`: one, or all that step this model. ``step`` then refuses gradients that were never
      averaged, and ranks compare the optimizers' settings, now and in each step.
    - `wire`: the dtype that travels. bfloat16 or float16 halve the bytes; sums are formed in fp32
      and rounded to the wire at each hop, and replicas stay bitwise equal. Gradients of no wider
      dtype travel as they are. A quantizer such as ``commrt.quantization.Int4()`` sends fewer bits;
      it needs an algorithm that sums in one step, ``commrt.Direct()``.
    - `bucket_cap_mb`: the size of a bucket, in MiB of gradients that travel together.
    - `gradients`: ``"views"`` keeps them in the buffers that travel, which saves the time of a copy
      and, on CPUs, its memory. ``param.grad`` is then the same memory in every step: clone what
      must outlive the next one. What views cannot do is refused (docs/integrations.md).
    - `broadcast_buffers`: send rank 0's buffers to all at the end of each synchronous step. A graph
      that was built with other values and has not run backward yet then ends in torch's own error.
      BatchNorm in training does not read its buffers, so this does not concern it.
    - `graphs`: after two steps with a schedule, a GPU captures what it does for a bucket, and
      replays it by one launch (docs/nccl.md). `Replica.why_not_graphs` says where it does not.
      False turns it off; True refuses what graphs cannot do.
    - `same_bits`: refuse an algorithm unless it adds all elements in one order, as `Direct` does.
      An average then has the same bits however gradients are cut into buckets (docs/same_bits.md).
    - `watch`: each step compares what weights the ranks hold before it, by a digest that rides with
      the gradients. So flipped bits on a wire or in memory, and weights that one rank alone has
      written or loaded, end in a `DisagreementError` in the next step, which names the ranks that
      are alone; with GPUs in the step after. Costs a pass over the weights (docs/evidence.md).
    - `also`: what goes along with the optimizers, such as a ``GradScaler``, learning rate
      schedulers, an average of the weights. All ranks begin with rank 0's state of it. With
      `BackupWorkers` a late rank takes it from another.

    Raises `UsageError` for a model that cannot be averaged, `ScheduleError` for an algorithm that
    does not keep its promise, `DisagreementError` if ranks differ.
    """
    world = _checked(world)
    check_stateful(also, "attach(also=)")
    flags = {
        "broadcast_buffers": broadcast_buffers,
        "graphs": graphs,
        "same_bits": same_bits,
        "watch": watch,
    }
    params, optimizers, wire = _check_attach(
        model, optimizer, algorithm, wire, bucket_cap_mb, gradients, flags
    )
    if world.size > 1:
        _require_read_only_forward(model)
    trained_by = getattr(algorithm, "trained_by", SYNCHRONOUS)  # an all-reduce says nothing
    if world.size > world.founders and trained_by not in TAKE_LATER_RANKS:
        what = "only to BackupWorkers, LocalSGD and gossip of weights can ranks come later"
        raise UsageError(f"init(up_to={world.size}) and {algorithm}: {what}")
    kind = ViewBucket if _wants_views(gradients, params, wire) else GradientBucket
    taken = attached_params()
    for name, param in params:
        if id(param) in taken:
            raise UsageError(
                f"{name} is attached already: detach() the first replica before attaching again"
            )
    if (device := params[0][1].device).type == "cuda":
        world.connect(device)
    world.attached += 1
    chosen = int(bucket_cap_mb * MIB), kind, broadcast_buffers, graphs, same_bits, watch
    scales = LossScales(also, keep_pace=trained_by == SYNCHRONOUS)
    copies = WeightCopies(optimizers)
    copies.find()
    request = Request(
        world, model, params, optimizers, also, algorithm, wire, *chosen, scales, copies
    )
    return cast("Replica", import_module(trained_by).attach(request))


def _checked(world: World | None) -> World:
    if world is not None and not isinstance(world, World):
        raise UsageError(
            f"world={world!r:.80} is no world: pass what commrt.init() returned, or leave it out"
        )
    world = current() if world is None else world
    world.require_all_ranks("attach()")
    if world.membership.needed:
        raise UsageError(
            "a model with BackupWorkers is attached to this world, whose ranks do different numbers"
            " of steps: attach both as one, in an nn.ModuleList, or detach() it first"
        )
    return world


def _check_attach(
    model: object,
    optimizer: object,
    algorithm: object,
    wire: AnyWire | None,
    cap_mb: object,
    gradients: object,
    flags: Mapping[str, object],
) -> tuple[list[Named], list[Optimizer], AnyWire | None]:
    """Return the parameters to average, the optimizers and what travels; raises `UsageError` for
    what cannot work.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}: attach() takes a torch.nn.Module first, then"
            " optimizers"
        )
    require_maker("algorithm", algorithm)
    own: AnyWire | None = getattr(algorithm, "wire", None)  # an algorithm may say what travels
    if None not in (wire, own) and wire != own:
        raise UsageError(
            f"wire={wire} here and wire={own} in {type(algorithm).__name__}: give it once"
        )
    wire = wire if own is None else own
    check_wire(wire)
    chosen = {
        "graphs": flags["graphs"] is True,
        "views": gradients == "views",
        "no optimizer": optimizer is None,
        "same bits": flags["same_bits"] is True,
        "watch": flags["watch"] is True,
    }
    require_compatible(algorithm, wire, [name for name, is_chosen in chosen.items() if is_chosen])
    if isinstance(cap_mb, bool) or not isinstance(cap_mb, int | float) or not 0 < cap_mb <= 1e9:
        raise UsageError(
            f"bucket_cap_mb={cap_mb!r:.80} must be a positive number of MiB: 25 is a good start"
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (name, flag) != ("graphs", None):
            raise UsageError(f"{name}={flag!r:.80}: give True or False")
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    _check_model(model, params)
    return params, _checked_optimizers(optimizer, params), wire


def _wants_views(gradients: object, params: Sequence[Named], wire: AnyWire | None) -> bool:
    """Return True for ``gradients="views"``; raises `UsageError` where they cannot be views of what
    travels.
    """
    if gradients not in ("own", "views"):
        raise UsageError(
            f'gradients={gradients!r:.80}: give "own", or "views" to keep them in what travels'
        )
    if gradients == "own":
        return False
    for name, param in params:
        own = gradient_dtype(param)
        travels = wire_dtype(gradient_dtype(param), wire)
        if own != travels:
            raise UsageError(
                f'gradients="views" needs gradients of the dtype that travels; those of {name} are'
                f" {own} and travel as {travels}: leave out wire= or gradients="
            )
    return True


def _checked_optimizers(given: object, params: Sequence[Named]) -> list[Optimizer]:
    found: list[Any] = (
        list(given) if isinstance(given, Iterable) else [] if given is None else [given]
    )
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


def check_stateful(owners: Sequence[object], call: str = "join()") -> None:
    """Raise `UsageError` for an object without a state to send, given to `call`."""
    if not isinstance(owners, Iterable):
        raise UsageError(f"{call} takes a list, not a {type(owners).__name__}: put it into one")
    for owner in owners:
        if not isinstance(owner, Stateful):
            raise UsageError(
                f"{call} was given a {type(owner).__name__}, which has no state_dict() and"
                " load_state_dict(): pass learning rate schedulers, a GradScaler and the like"
            )


def _check_model(model: nn.Module, params: Sequence[Named]) -> None:
    """Raise `UsageError` unless the gradients of `params` can be averaged and all state of `model`
    overwritten.
    """
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
    _check_devices(chain(params, model.named_buffers()))
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged: use"
                " sparse=False"
            )


def _require_read_only_forward(model: nn.Module) -> None:
    """Raise `UsageError` for a module of torch whose forward pass writes parameters, by what is in
    a rank's batch.
    """
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


def _comparable(value: object) -> str:
    """Return `value` as text that ranks can compare: without the places where a process keeps
    objects.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def describe_buffers(model: nn.Module) -> str:
    """Return names, dtypes and shapes of all buffers, as ranks compare them."""
    return ", ".join(f"{name} {b.dtype}{list(b.shape)}" for name, b in model.named_buffers())


def _describe_optimizers(optimizers: Sequence[Optimizer], params: Sequence[Named]) -> str:
    """Return all that decides how `optimizers` step, but the values of their state: types,
    settings, who has state.
    """
    names = {id(param): name for name, param in params}
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [
                names.get(id(param), "-") + "*" * (param in optimizer.state)
                for param in group["params"]
            ]
            settings = ", ".join(
                f"{key}={_comparable(value.tolist() if isinstance(value, Tensor) else value)}"
                for key, value in group.items()
                if key not in ("params", "param_names")
            )
            groups.append(
                f"{type(optimizer).__name__}({settings}) of {' '.join(members)}, * has state"
            )
    return "; ".join(groups)
