# SPDX-License-Identifier: Apache-2.0
"""torch's DistributedDataParallel over Gloo, to compare with:
what ``--algorithm ddp`` trains with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import commrt

__all__ = ["DdpReplica", "ddp_group"]

HOOKS = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


@contextmanager
def ddp_group(world: commrt.World) -> Iterator[None]:
    """Make torch's default group from the ranks and the store of `world`."""
    store = PrefixStore("ddp", world.store)
    limit = timedelta(seconds=world.timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class DdpReplica:
    """torch's DDP with the members of `commrt.Replica` that a run uses.

    The exposed time is the one from the last gradient to the optimizer's step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, bucket_cap_mb: float, wire: torch.dtype | None
    ) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        # DDP refuses the bf16 hook on CPUs by its name, although Gloo supports bf16
        if wire is not None:
            self.model.register_comm_hook(None, lambda group, bucket: HOOKS[wire](group, bucket))  # noqa: PLW0108
        self.last: commrt.training.StepReport | None = None
        self._members = tuple(range(dist.get_world_size()))
        self._stats = commrt.training.Stats()
        self._last_gradient_s = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._note_gradient)
        optimizer.register_step_pre_hook(self._note_step)

    @property
    def step(self) -> int:
        """Return the number of updates."""
        return self._stats.steps

    def _note_gradient(self, _: Tensor) -> None:
        self._last_gradient_s = perf_counter()

    def _note_step(self, *_: object) -> None:
        self.last = commrt.training.StepReport(
            self.step, self._members, perf_counter() - self._last_gradient_s, ()
        )
        self._stats = self._stats.plus(self.last)

    def stats(self) -> commrt.training.Stats:
        """Return the totals; DDP does not tell how long it communicates, nor what it sends."""
        return self._stats

    def disagreement(self) -> float:
        """Return 0: DDP keeps all replicas equal."""
        return 0.0

    def consolidate(self) -> None:
        """Do nothing: all replicas are equal."""
