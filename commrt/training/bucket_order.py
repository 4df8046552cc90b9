# SPDX-License-Identifier: Apache-2.0
"""In which order the parameters of a model fill its buckets: as rank 0's gradients become ready.

It replaces the engine's buckets while nothing is in flight: at the end of a step, on the thread
that ends the backward pass, or where a checkpoint is loaded, on the one that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commrt.buckets.averaging import AveragingEngine
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.tensors import Named


class BucketOrder:
    """The order of the parameters in the buckets of one model, the same on all ranks.

    At first it is that of `params`, then what `observe` or `restore` found. Both are collective,
    and write of others only the buckets of `engine`, whose residuals they keep.
    """

    def __init__(
        self,
        engine: AveragingEngine,
        build: Callable[[Sequence[Named]], Sequence[GradientBucket]],
        params: Sequence[Named],
    ) -> None:
        self._engine = engine
        self._build = build
        self._params = params
        self.is_final = False
        """True once it was observed or restored: it never changes by observing again."""

    def observe(self, step: int) -> None:
        """Cut the buckets anew, in the order in which rank 0's gradients became ready."""
        order = torch.tensor(self._engine.order.places(), device="cpu")
        self._engine.submit_broadcast(order, step).result()
        self._use(order.tolist(), step)

    def names(self) -> list[str] | None:
        """Return the names of the parameters in their final order; None before it is known."""
        return [name for name, _ in self._params] if self.is_final else None

    def restore(self, names: Sequence[str] | None, step: int) -> None:
        """Cut the buckets in the order of `names`, if ranks agree and the parameters have these.

        So the same values of a quantized wire share scales as in the run that saved `names`.
        """
        world = self._engine.world
        place = {name: i for i, (name, _) in enumerate(self._params)}
        order = [place[name] for name in names or () if name in place]
        is_equal = world.all_equal("the order of gradients", str(order))
        if is_equal and len(order) == len(place) and world.size > 1:
            self._use(order, step)

    def _use(self, places: Sequence[int], step: int) -> None:
        """Cut the buckets with the parameters at `places`, in this order, before `step`."""
        self.is_final = True
        if [*places] != sorted(places):
            self._params = [self._params[i] for i in places]
            engine = self._engine
            before = engine.residuals()
            engine.replace_buckets(())  # the new ones take their memory
            engine.replace_buckets(self._build(self._params))
            engine.restore_residuals(before)
            engine.submit_preparation(step, engine.everybody).result()
