# SPDX-License-Identifier: Apache-2.0
"""Attach a model: the entry point for custom training loops.

It checks the arguments, and hands them to the module that the algorithm names. Of others it changes
the world: the count of models, and a connection for GPUs. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Literal, cast

from torch import nn
from torch.optim import Optimizer

from commrt.algorithm import SYNCHRONOUS, Algorithm
from commrt.algorithms.arguments import as_algorithm
from commrt.algorithms.torus import Torus2D
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.plan import MIB
from commrt.buckets.view_bucket import ViewBucket
from commrt.options import require_compatible
from commrt.runtime.init import current
from commrt.runtime.wire import AnyWire
from commrt.runtime.world import World
from commrt.training.loss_scale import LossScales
from commrt.training.refusals import (
    optimizers_of,
    require_averageable,
    require_fitting_world,
    require_flags,
    require_module,
    require_not_attached,
    require_open_to_models,
    require_read_only_forward,
    require_size,
    require_views,
    require_world,
    wire_of,
)
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.stateful import Stateful, check_stateful
from commrt.training.weight_copies import WeightCopies


def attach(  # noqa: PLR0913  # each has its default
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    algorithm: Algorithm | str = Torus2D(),  # noqa: B008  # a frozen value
    *,
    world: World | None = None,
    wire: AnyWire | str | None = None,
    bucket_cap_mb: float = 25.0,
    gradients: Literal["own", "views"] = "own",
    broadcast_buffers: bool = True,
    graphs: bool | None = None,
    same_bits: bool = False,
    watch: bool = False,
    also: Sequence[Stateful] = (),
) -> Replica:
    """Make `model` a replica of a world: ``backward()`` averages its gradients over all ranks.

    Collective. All ranks begin with rank 0's parameters, buffers and optimizer state. During each
    backward pass buckets leave on the communication thread as their gradients become ready.
    ``backward()`` returns when all are averaged, in place in ``param.grad``; leave them alone until
    then. The hooks live as long as the model, or until `Replica.detach`.

    - `optimizer`: one, or all that step this model. ``step`` then refuses gradients that were never
      averaged, and ranks compare the optimizers' settings, now and in each step.
    - `algorithm`: an object, or its name on the command line, such as "ring", "gossip" or "local".
    - `wire`: the dtype that travels, or a name, such as "bf16" or "int4". bfloat16 or float16
      halve the bytes; sums are formed in fp32 and rounded to the wire at each hop, and replicas
      stay bitwise equal. Gradients of no wider dtype travel as they are. A quantizer such as
      ``commrt.Int4()`` sends fewer bits; it needs an algorithm that sums in one step,
      ``commrt.Direct()``.
    - `bucket_cap_mb`: the size of a bucket, in MiB of gradients that travel together.
    - `gradients`: ``"views"`` keeps them in the buffers that travel, which saves the time of a copy
      and, on CPUs, its memory. ``param.grad`` is then the same memory in every step: clone what
      must outlive the next one. What views cannot do is refused (docs/your_loop.md).
    - `broadcast_buffers`: send rank 0's buffers to all at the end of each synchronous step. A graph
      that was built with other values and has not run backward yet then ends in torch's own error.
      BatchNorm in training does not read its buffers, so this does not concern it.
    - `graphs`: after two steps with a schedule, a GPU captures what it does for a bucket, and
      replays it by one launch (docs/gpus.md). `Replica.why_not_graphs` says where it does not.
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
    require_world(world)
    if world is None:
        world = current()
    require_open_to_models(world)
    check_stateful(also, "attach(also=)")
    require_module(model)
    algorithm = as_algorithm(algorithm)
    wire = wire_of(algorithm, wire)
    chosen = {
        "graphs": graphs is True,
        "views": gradients == "views",
        "no optimizer": optimizer is None,
        "same bits": same_bits is True,
        "watch": watch is True,
    }
    require_compatible(algorithm, wire, [name for name, is_chosen in chosen.items() if is_chosen])
    require_size(bucket_cap_mb)
    require_flags(
        broadcast_buffers=broadcast_buffers, graphs=graphs, same_bits=same_bits, watch=watch
    )
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    require_averageable(model, params)
    optimizers = optimizers_of(optimizer, params)
    if world.size > 1:
        require_read_only_forward(model)
    trained_by = getattr(algorithm, "trained_by", SYNCHRONOUS)  # an all-reduce says nothing
    is_synchronous = trained_by == SYNCHRONOUS
    require_fitting_world(world, algorithm, may_grow=not is_synchronous)
    require_views(gradients, params, wire)
    require_not_attached(params)

    device = params[0][1].device
    if device.type == "cuda":
        world.connect(device)
    world.attached += 1
    copies = WeightCopies(optimizers)
    copies.find()
    request = Request(
        world=world,
        number=world.attached,
        model=model,
        params=params,
        optimizers=optimizers,
        also=also,
        algorithm=algorithm,
        wire=wire,
        cap_nbytes=int(bucket_cap_mb * MIB),
        kind=ViewBucket if gradients == "views" else GradientBucket,
        broadcast_buffers=broadcast_buffers,
        graphs=graphs,
        same_bits=same_bits,
        watch=watch,
        scales=LossScales(also, keep_pace=is_synchronous),
        copies=copies,
    )
    return cast("Replica", import_module(trained_by).attach(request))
