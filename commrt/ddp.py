# SPDX-License-Identifier: Apache-2.0
"""The door for those who keep DistributedDataParallel: its buckets travel along a schedule."""
# Annotations are objects here: DDP compares those of a hook with its own types.

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from commrt.algorithms.torus import Torus2D
from commrt.autograd import at_end_of_backward, current_pass
from commrt.opening import init
from commrt.schedule import Algorithm
from commrt.summing import check_algorithm
from commrt.transport.protocol import Moment
from commrt.work import Work
from commrt.world import World

__all__ = ["DDPState", "ddp_hook"]

OUTSIDE = -1
"""The number of a backward pass, where there is none."""


@dataclass
class DDPState:
    """How the gradients of one DDP model travel: ``model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)``.

    `algorithm` and `wire` are as for `attach`; gossip and backup workers need more than gradients, so `attach` instead.
    `world` is by default the one that is open when the first gradients leave, or `init`'s, through DDP's own group. DDP
    must span all of its ranks. Raises `UsageError` for an algorithm that is no all-reduce.
    """

    algorithm: Algorithm = Torus2D()  # noqa: RUF009  # a frozen value
    wire: torch.dtype | None = None
    world: World | None = None
    step: int = field(default=-1, init=False)
    """Of the gradients that leave; for errors and traces."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)

    def begin(self, bucket: GradBucket) -> Work:
        """Send `bucket` on its way."""
        if self.world is None:
            self.world = init()
        self.step += bucket.index() == 0
        moment = Moment(self.step, bucket.index())
        return self.world.all_reduce(
            bucket.buffer(), algorithm=self.algorithm, wire=self.wire, async_op=True, moment=moment
        )


def ddp_hook(state: DDPState, bucket: GradBucket) -> Future[Tensor]:
    """Average `bucket` over all ranks of the state's world, under the rest of the backward pass; called by DDP.

    What ends a transfer is raised by ``backward()``. Cost: the schedule's steps and bytes, and a copy to and from a
    wire buffer of the largest bucket's size.
    """
    work = state.begin(bucket)
    if current_pass() != OUTSIDE:  # a rank that is in DDP's join() has none
        at_end_of_backward(work.wait)  # before DDP waits, which makes of any error a RuntimeError
    return work.get_future().then(lambda future: future.value()[0])
