# SPDX-License-Identifier: Apache-2.0
"""The two ways ``commrt train`` averages gradients: a replica of ours, and torch's DDP to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from commrt.model.autograd import on_gradient
from commrt.replicas.replica import Replica
from commrt.replicas.report import StepReport

__all__ = ["Attached", "Averaging", "Cost", "Wrapped"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What averaging has cost this rank so far."""

    exposed_s: float
    """How long backward passes waited for communication."""
    comm_s: float | None = None
    """How long communication took, hidden or not; None where the library does not tell."""
    late: int = 0
    """Backward passes whose gradients came too late."""
    late_s: float = 0.0
    """How long the others would have waited for them."""
    dropped: int = 0
    """Gradients of all ranks that were not used, as far as this one knows."""
    saved_s: float = 0.0
    """How long all would have waited for them, likewise."""
    nbytes_sent: int | None = None
    """None where the library does not tell."""


HOOKS = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


class Averaging(Protocol):
    """A model whose backward passes average gradients over all ranks."""

    @property
    def model(self) -> nn.Module:
        """What to call."""
        ...

    @property
    def step(self) -> int:
        """How many updates the weights have seen."""
        ...

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``; returns when the gradients are averaged."""
        ...

    def cost(self) -> Cost:
        """Totals so far."""
        ...

    def last(self) -> StepReport | None:
        """What the latest step was, once it is known."""
        ...

    def finish(self) -> float:
        """Make all replicas equal; how far apart they were. Collective."""
        ...


class Attached:
    """A model attached to a `Replica`."""

    def __init__(self, replica: Replica) -> None:
        self.model = replica.model
        self._replica = replica

    @property
    def step(self) -> int:
        """See `Averaging`."""
        return self._replica.step

    def backward(self, loss: Tensor) -> None:
        """See `Averaging`."""
        torch.autograd.backward(loss)

    def cost(self) -> Cost:
        """See `Averaging`."""
        stats = self._replica.stats()
        return Cost(
            stats.exposed_s,
            stats.comm_s,
            stats.steps - stats.counted,
            stats.late_s,
            stats.dropped,
            stats.saved_s,
            stats.nbytes_sent,
        )

    def last(self) -> StepReport | None:
        """See `Averaging`."""
        return self._replica.last

    def finish(self) -> float:
        """See `Averaging`."""
        apart = self._replica.disagreement()
        self._replica.consolidate()
        return apart


class Wrapped:
    """A model in DDP. What is exposed is the time from the last gradient to the end of the backward pass."""

    def __init__(self, model: nn.Module, bucket_cap_mb: float, wire: torch.dtype | None) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        self._members = tuple(range(dist.get_world_size()))
        if wire is not None:  # DDP refuses the bf16 hook on CPUs by its name, though Gloo has learnt it since
            self.model.register_comm_hook(None, lambda group, bucket: HOOKS[wire](group, bucket))  # noqa: PLW0108
        self.step = 0
        self._last: StepReport | None = None
        self._last_gradient_s = 0.0
        self._exposed_s = 0.0
        for param in model.parameters():
            on_gradient(param, self._note)

    def _note(self, _: Tensor) -> None:
        self._last_gradient_s = perf_counter()

    def backward(self, loss: Tensor) -> None:
        """See `Averaging`."""
        torch.autograd.backward(loss)
        exposed_s = perf_counter() - self._last_gradient_s
        self._exposed_s += exposed_s
        self._last = StepReport(self.step, self._members, exposed_s, ())
        self.step += 1

    def cost(self) -> Cost:
        """See `Averaging`."""
        return Cost(self._exposed_s)

    def last(self) -> StepReport | None:
        """See `Averaging`."""
        return self._last

    def finish(self) -> float:
        """See `Averaging`: they are."""
        return 0.0
