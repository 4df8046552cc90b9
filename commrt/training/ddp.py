# SPDX-License-Identifier: Apache-2.0
"""A communication hook for DistributedDataParallel: DDP's buckets travel along a schedule.

DDP calls it on the thread that runs the backward pass, for which the thread that trains waits. It
overwrites DDP's buckets with their means, and knows nothing of `attach`.
"""

# Annotations are objects here: DDP compares those of a hook with its own types.

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import as_algorithm
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.runtime.all_reduce_call import check_all_reduce
from commrt.runtime.init import init, is_open
from commrt.runtime.wire import AnyWire, as_wire, is_quantized
from commrt.runtime.work import Work
from commrt.runtime.world import World
from commrt.training.backward_pass import NO_PASS, at_end_of_backward, current_pass
from commrt.training.ddp_owner import ddp_owner, require_same_ranks
from commrt.training.refusals import require_world
from commrt.transport.protocol import Tag


@dataclass
class DDPState:
    """How the gradients of one DDP model travel.

    Register it: ``model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)``. `algorithm` and
    `wire` are as for `attach`; for gossip and backup workers use `attach`, as they need more than
    gradients. `world` is by default the one that is open when gradients leave, or `init`'s, through
    DDP's own group. DDP must span all of its ranks, and each model needs a state of its own. What a
    `wire` with feedback has lost in rounding is not saved with the model. Raises `UsageError` for
    what cannot work, some of it in the first ``backward()``.

    The hook alone writes the fields but these three; of others it counts in `World.attached`.
    """

    algorithm: Algorithm | str = Torus2D()  # noqa: RUF009  # a frozen value
    wire: AnyWire | str | None = None
    world: World | None = None
    step: int = field(default=-1, init=False)
    """The step of the gradients that leave, which errors and traces name; only read it."""
    number: int = field(default=0, init=False)
    """The number of the model, among those attached to the world; only read it."""
    _used: World | None = field(default=None, init=False, repr=False)
    """The world of the latest gradients."""
    _params: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    """Ids of the model's parameters; none where the model was not found."""
    _residuals: dict[int, tuple[tuple[int, ...], Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    """For each bucket, its parameters' ids, and their residuals: what rounding lost, sent later."""
    _residual_of: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Residuals by parameter's id, as views: DDP's second step has other buckets."""

    def __post_init__(self) -> None:
        require_world(self.world)
        self.algorithm = as_algorithm(self.algorithm)
        self.wire = as_wire(self.wire)
        check_all_reduce(self.algorithm, self.wire)

    def begin(self, bucket: GradBucket) -> Work:
        """Start the all-reduce of `bucket`."""
        first = bucket.parameters()[0]
        world = self._open(first)
        if self._params and id(first) not in self._params:
            raise UsageError(
                "two models were given one DDPState: register each with a state of its own"
            )
        if bucket.index() == 0:
            self.step += 1
        return world.all_reduce(
            bucket.buffer(),
            algorithm=self.algorithm,
            wire=self.wire,
            residual=self._residual(bucket),
            async_op=True,
            tag=Tag(self.step, f"{bucket.index()} of DDP model {self.number}"),
        )

    def _residual(self, bucket: GradBucket) -> Tensor | None:
        """Return the residual of `bucket`, made anew where its parameters are others than before.

        None if the wire has no feedback.
        """
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
            owner = ddp_owner(self, param)
            require_same_ranks(world, owner)
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
    if (
        current_pass() != NO_PASS
    ):  # a rank that is in DDP's join() has no pass, and nothing else to do
        at_end_of_backward(work.wait)  # before DDP waits, which turns any error into a RuntimeError
    else:
        work.wait()
    return work.get_future().then(lambda future: future.value()[0])
