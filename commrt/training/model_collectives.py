# SPDX-License-Identifier: Apache-2.0
"""What all members of a world do together with their models: send state, take means, compare.

Collective, on the thread that trains; the communication thread sends. `take_means`,
`farthest_from_mean` and `require_equal_digests` go on without a lost rank by themselves. The others
are done once, among those who are members then: call them in ``membership.together(lambda: ...)``
where a rank may be lost. A source is the lowest member where none is given. Only ``overwrite_...``
and `take_means` write: the model, or the states of the owners, that they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors

from commrt.algorithms import tree
from commrt.buckets.digest import Digest
from commrt.buckets.plan import MIB
from commrt.buckets.tensors import exchanged_tensors
from commrt.buckets.weight_watch import require_equal
from commrt.runtime.world import World
from commrt.training.gathering import gather_integers, gather_values, mean, total_of
from commrt.training.stateful import Stateful, dump, load
from commrt.training.tensor_bytes import flatten, restore
from commrt.training.unread_buffers import unread_buffers
from commrt.transport.protocol import Tag


def overwrite_model(
    world: World,
    model: nn.Module,
    step: int,
    source: int | None = None,
    *,
    buffers_only: bool = False,
) -> None:
    """Overwrite parameters and buffers with the source's."""
    unread = unread_buffers(model)
    params = [] if buffers_only else [*model.parameters()]
    for batch in _take_tensors([*params, *model.buffers()], 25 * MIB):  # type: ignore[no-untyped-call]  # torch's own
        flat = flatten(batch)
        if not _broadcast(world, flat, step, source):
            restore(flat, batch, unread)


def _broadcast(world: World, flat: Tensor, step: int, source: int | None) -> bool:
    """Overwrite `flat` with the source's, among those who are members then; True on the source."""

    def broadcast_now() -> bool:
        members = sorted(world.members, key=lambda rank: (rank != source, rank))
        world.run_now(tree.broadcast(len(members)), flat, Tag(step, "state"), members)
        return members[0] == world.rank

    return world.membership.submit(broadcast_now).result()


def overwrite_states(
    world: World, owners: Sequence[Stateful], step: int, source: int | None = None
) -> None:
    """Overwrite the state of `owners` with the source's; it loads it too, to fail as others."""
    if not owners or len(world.members) == 1:
        return
    is_source = min(world.members, key=lambda rank: (rank != source, rank)) == world.rank
    flat = dump(owners) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = torch.tensor([flat.numel()], device="cpu")
    _broadcast(world, nbytes, step, source)
    flat = flat if is_source else flat.new_empty(int(nbytes))
    if flat.numel():
        _broadcast(world, flat, step, source)
    load(flat, owners)


def take_means(world: World, model: nn.Module, step: int) -> None:
    """Overwrite the weights of `model` and its running means and variances with their means."""
    tensors = [slot.tensor() for slot in exchanged_tensors(model)]
    values = world.membership.together(lambda: mean(world, tensors, step))
    means = [value.to(tensor.dtype) for tensor, value in zip(tensors, values, strict=True)]
    restore(flatten(means), tensors)


def farthest_from_mean(world: World, tensors: Sequence[Tensor], step: int) -> float:
    """Return the farthest member's distance from the mean of `tensors`, relative to its norm."""
    own = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    # a one of each rank whose tensors are in the sum
    counted = [own, own.new_ones(1)]
    total, count = world.membership.together(lambda: total_of(world, counted, step))
    norm = (total / count).norm().clamp(min=torch.finfo(torch.float64).tiny)  # of zeros too
    share = float((own - total / count).norm() / norm)
    shares = world.membership.together(lambda: gather_values(world, share, step))
    return float(torch.tensor([*shares.values()], dtype=torch.float64, device="cpu").max())


def require_equal_digests(world: World, digest: Digest, step: int) -> None:
    """Raise `DisagreementError` if members hold different weights now."""
    high, low = divmod(digest.now(), 1 << 32)
    highs = world.membership.together(lambda: gather_integers(world, high, step))
    lows = world.membership.together(lambda: gather_integers(world, low, step))
    require_equal({rank: (highs[rank] << 32) + lows[rank] for rank in highs}, step)
