# SPDX-License-Identifier: Apache-2.0
"""What rides with gradients: a few numbers of each rank, which all ranks read in the sum.

It writes only its part of a wire, and decides nothing: see `Riders` for threads.

The first bucket has a slot for each rank, between its flags and its gradients. A rank writes its
own slot, one byte per element, and zeros to the others'. Bytes are exact in every dtype that
travels, and only one rank adds to each, so the sum holds the slots of all. What is a sum, a mean, a
minimum, or who was first, each reader says for itself. Zeros travel in any case, so where nothing
rides nobody does anything, and a slot that nobody reads costs nothing.

To let something else ride, add a field to `SLOT`, and whoever fills and reads it: `riding` in
`training` for the loop's, `weights_that_ride` and `weight_watch` here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commrt.buckets.digest import Digest

MOST_NUMBERS = 8
SLOT = np.dtype(
    [
        ("present", "u1"),  # 1
        # of `Replica.ride`, in the order of their names; NaN for none
        ("numbers", "<f8", MOST_NUMBERS),
        ("names", "<u4"),  # a digest of those names, 0 for none
        ("flags", "<u4"),
        ("weight", "<f8"),  # of `Replica.weigh`: what the gradients weigh
        # of the weights before the step, with ``watch=True``; with gossip, of those sent
        ("digest", "<u8"),
        # with gossip: the step after which all stop, 0 for none, and who has asked
        ("stop_at", "<u4"),
        ("asker", "<u4"),
    ]
)
"""What rides for one rank; 97 bytes."""
STOP = 1
"""Flag: the loop of this rank asks all to stop."""
SKIP = 2
"""Flag: it asks all to leave out this step."""
WEIGHS = 4
"""Flag: `Replica.weigh` has weighed its gradients."""
EMPTY = 8
"""Flag: it had no backward pass, so it cannot say whether gradients are weighed."""

Slots = npt.NDArray[np.void]
"""Of dtype `SLOT`, [ranks], or [] for that of one rank."""


class Leaving(NamedTuple):
    """What rides for this rank in one step."""

    slot: Slots | None = None
    unit: float | None = None
    """By what gradients that weigh were divided; None where this rank has gradients that do not."""
    weighed: int = 0
    """1 if the gradients were weighed, else 0; the header compares it (`Header.weighed`)."""
    names: tuple[str, ...] = ()
    """Of the numbers, in their order."""


def riding_numel(ranks: int) -> int:
    """Return how many elements the slots of so many `ranks` take."""
    return ranks * SLOT.itemsize


NOTHING_LEAVES = Leaving()


class Riders:
    """The slots of all ranks in `area`, a part of a wire; this one's `rank` says which is its own.

    A message of gossip has one slot, and `rank` is 0 there. Where ranks mix what they have with
    what came, the sum is a weighted mean: `find_scale` tells by what slots were multiplied.

    The thread that trains calls `load` before the bucket is sent, and `read` after the step, until
    the next one begins. In between all belongs to the thread that averages the bucket: mostly the
    communication thread. There `WeightWatch` reads too. `add_digest` may come there when the step
    has begun and before `load`, or at the same time: each writes fields of its own.
    """

    def __init__(self, area: Tensor, rank: int) -> None:
        self._area = area
        self._rank = rank
        self.is_loaded = False
        """`leaving` has something for the slot. Only `load` writes both."""
        self.leaving = NOTHING_LEAVES
        self.digest: int | None = None
        """What rides of this rank's weights in each step; None if nobody watches.

        Written by `add_digest`, and by who replaces buckets, with what those before had.
        """
        # `leaving`'s, to which `write` adds the digest
        self._own: Slots | None = None
        # by which slots on the wire are multiplied where ranks mix; None where they do not
        self._scale: float | None = None

    @property
    def knows_nothing(self) -> bool:
        """True if this rank had no backward pass, so that it cannot tell whether gradients are
        weighed.
        """
        return self._own is not None and bool(self._own["flags"] & EMPTY)

    def load(self, leaving: Leaving) -> None:
        """Let `leaving` ride in the step that begins."""
        self.leaving = leaving
        self._own = leaving.slot
        self.is_loaded = leaving.slot is not None

    def add_digest(self, weights: Digest) -> None:
        """Let a digest of `weights` as they are now ride too; on a GPU this waits."""
        self.digest = weights.now()

    def write(self) -> None:
        """Write this rank's slot to the wire, where zeros are."""
        if self.digest is not None:
            self._own = np.zeros((), SLOT) if self._own is None else self._own
            self._own["digest"] = self.digest
        if self._own is not None:
            begin = self._rank * SLOT.itemsize
            said = torch.from_numpy(self._own.reshape(1).view(np.uint8))
            self._area[begin : begin + SLOT.itemsize].copy_(said)

    def write_alone(self) -> None:
        """Write this rank's slot, and that no other rank said anything."""
        self._area.zero_()
        self._scale = None
        self.write()

    def find_scale(self) -> float:
        """Return by what the slots on the wire are multiplied where ranks mix: this rank's own
        `present` was 1. `read` divides by it. On a GPU this waits for the sum.
        """
        self._scale = float(self._area[self._rank * SLOT.itemsize])
        return self._scale

    def read(self) -> Slots:
        """Return what all ranks have sent in the latest step; on a GPU this waits for the sum."""
        area = self._area if self._scale is None else self._area / self._scale
        return area.to("cpu", torch.uint8).numpy().view(SLOT)
