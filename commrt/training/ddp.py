# SPDX-License-Identifier: Apache-2.0
"""A communication hook for DistributedDataParallel: DDP's buckets travel along a schedule.

DDP calls it on the thread that runs the backward pass. It knows nothing of `attach`.
"""

# Annotations are objects here: DDP compares those of a hook with its own types.

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from commrt.algorithm import Algorithm
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.runtime.all_reduce_call import check_all_reduce
from commrt.runtime.init import init, is_open
from commrt.runtime.wire import AnyWire, check_wire, is_quantized
from commrt.runtime.work import Work
from commrt.runtime.world import World
from commrt.training.hooks import at_end_of_backward, current_pass
from commrt.transport.protocol import Tag

T = TypeVar("T")


@dataclass
class DDPState:
    """How the gradients of one DDP model travel.

    Register it: ``model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)``. `algorithm` and
    `wire` are as for `attach`; for gossip and backup workers use `attach`, as they need more than
    gradients. `world` is by default the one that is open when gradients leave, or `init`'s, through
    DDP's own group. DDP must span all of its ranks, and each model needs a state of its own. What a
    `wire` with feedback has lost in rounding is not saved with the model. Raises `UsageError` for
    what cannot work, some of it in the first ``backward()``.
    """

    algorithm: Algorithm = Torus2D()  # noqa: RUF009  # a frozen value
    wire: AnyWire | None = None
    world: World | None = None
    step: int = field(default=-1, init=False)
    """The step of the gradients that leave; for errors and traces."""
    number: int = field(default=0, init=False)
    """The number of the model, among those attached to the world."""
    _used: World | None = field(default=None, init=False, repr=False)
    _params: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    _residuals: dict[int, tuple[tuple[int, ...], Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    """For each bucket, its parameters by id, and their residuals."""
    _residual_of: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The same for each parameter, as views: DDP's second step has other buckets."""

    def __post_init__(self) -> None:
        check_wire(self.wire)
        check_all_reduce(self.algorithm, self.wire)

    def begin(self, bucket: GradBucket) -> Work:
        """Start the all-reduce of `bucket`."""
        first = bucket.parameters()[0]
        world = self._open(first)
        if self._params and id(first) not in self._params:
            raise UsageError(
                "two models were given one DDPState: register each with a state of its own"
            )
        self.step += bucket.index() == 0
        return world.all_reduce(
            bucket.buffer(),
            algorithm=self.algorithm,
            wire=self.wire,
            residual=self._residual(bucket),
            async_op=True,
            tag=Tag(self.step, f"{bucket.index()} of DDP model {self.number}"),
        )

    def _residual(self, bucket: GradBucket) -> Tensor | None:
        if not (is_quantized(self.wire) and self.wire.feedback):
            return None
        params = bucket.parameters()
        owned = self._residuals.get(bucket.index())
        ids = tuple(map(id, params))
        if owned is None or owned[0] != ids:
            zeros = [param.new_zeros(param.numel(), dtype=torch.float32) for param in params]
            owned = ids, torch.cat([*map(self._residual_of.get, ids, zeros)])
            self._residuals[bucket.index()] = owned
            self._residual_of |= zip(ids, torch.split(owned[1], [*map(len, zeros)]), strict=True)
        return owned[1]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a fresh state, for a copy of DDP's model."""
        return type(self)(self.algorithm, self.wire, self.world)

    def __getstate__(self) -> dict[str, object]:
        """Return what is saved with DDP's model; the loaded state finds a world anew."""
        return vars(type(self)(self.algorithm, self.wire))

    def _open(self, param: Tensor) -> World:
        """Return the world used before; if it is closed and `world` was left out, the open one."""
        if self._used is None or (self._used.closed and self.world is None and is_open()):
            world = init() if self.world is None else self.world
            _require_same_ranks(world, owner := _owner(self, param))
            self._params = frozenset() if owner is None else frozenset(map(id, owner.parameters()))
            world.attached += 1
            self._used = world
            self.number = world.attached
            self.step = -1
        return self._used


def ddp_hook(state: DDPState, bucket: GradBucket) -> Future[Tensor]:
    """Average `bucket` over all ranks of the state's world, under the backward pass; DDP calls it.

    ``backward()`` raises what ends a transfer. Cost: the schedule's steps and bytes, and a copy to
    and from a wire buffer of the largest bucket's size.
    """
    if not isinstance(state, DDPState):
        raise UsageError(
            f"the hook's state is {state!r:.80}: call model.register_comm_hook(commrt.DDPState(),"
            " commrt.ddp_hook)"
        )
    work = state.begin(bucket)
    if current_pass() != -1:  # a rank that is in DDP's join() has no pass, and nothing else to do
        at_end_of_backward(work.wait)  # before DDP waits, which turns any error into a RuntimeError
    else:
        work.wait()
    return work.get_future().then(lambda future: future.value()[0])


def _owner(state: DDPState, param: Tensor) -> DistributedDataParallel | None:
    """Return the model with the parameter `param` with which `state` was registered.

    DDP does not tell its hook, so this asks the garbage collector, once per world. It must not list
    all objects: a tuple in such a list could not be completed by the thread that makes it.
    """
    hooks = _holders(list, _holders(tuple, [state]))
    models = _holders(DistributedDataParallel, [*hooks, *_holders(dict, hooks)])
    owners = [
        one for one in models if any(state is known for _, known in getattr(one, "_comm_hooks", ()))
    ]
    return next((one for one in owners if any(each is param for each in one.parameters())), None)


def _holders(kind: type[T], things: Sequence[object]) -> list[T]:
    return [one for one in gc.get_referrers(*things) if issubclass(type(one), kind)]


def _require_same_ranks(world: World, model: DistributedDataParallel | None) -> None:
    """Raise `UsageError` if gradients would be averaged over other ranks than DDP's."""
    group = None if model is None else model.process_group
    try:
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
    except ValueError as error:
        raise UsageError(
            "DDP's process group was destroyed: make a new DDP model in the group there is now"
        ) from error
    if model is not None and (rank, size) != (world.rank, world.size):
        raise UsageError(
            f"DDP has rank {rank} of {size}, and commrt's world rank {world.rank} of {world.size}:"
            " call init_process_group() before commrt.init(), and make DDP over all ranks"
        )
