# SPDX-License-Identifier: Apache-2.0
"""What rides with the gradients: a few numbers of each rank, which all ranks read when the sum is
there.

The first bucket has a slot for each rank, between its flags and its gradients. A rank writes its
own slot, one byte per element, and zeros to the others'. Bytes are exact in every dtype that
travels, and only one rank adds to each, so the sum holds the slots of all. What is a sum, a mean, a
minimum, or who was first, each reader says for itself. Zeros travel in any case, so where nothing
rides nobody does anything, and a slot that nobody reads costs nothing.

To let something else ride, add a field to `SLOT`, and whoever fills and reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commrt.buckets.digest import Digest
from commrt.errors import DisagreementError

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
SKIP = 2
WEIGHS = 4
EMPTY = 8
"""Flags. EMPTY: this rank had no backward pass, and knows nothing of weights."""

Slots = npt.NDArray[np.void]
"""Of dtype `SLOT`, [ranks], or [] for that of one rank."""


class Leaving(NamedTuple):
    """What rides for this rank in one step."""

    slot: Slots | None = None
    unit: float | None = None
    """By what gradients that weigh were divided; None where this rank has gradients that do not."""
    weighed: int = 0
    """What the header says of that."""
    names: tuple[str, ...] = ()
    """Of the numbers, in their order."""


def riding_numel(ranks: int) -> int:
    """Return how many elements the slots of so many `ranks` take."""
    return ranks * SLOT.itemsize


NOTHING_LEAVES = Leaving()


class Riders:
    """The slots of all ranks in `area`, a part of a wire.

    The thread that trains calls `load` before the bucket is sent, and `read` after the step, until
    the next one begins. In between the communication thread calls `write`, and what reads.
    """

    def __init__(self, area: Tensor, rank: int) -> None:
        self._area = area
        self._rank = rank
        self.is_loaded = self.is_watched = False
        """This rank writes something in this step: what it was given, and a digest; each is one
        thread's to set.
        """
        self.leaving = NOTHING_LEAVES
        self._own: Slots | None = None
        self.share: float | None = None
        """What part of each slot is on the wire, where ranks mix; None where they do not, so that
        all of it is.
        """
        self.weight: float | None = None
        """What all gradients of the latest step weighed; None if none was weighed."""
        self.may_weigh_nothing = False
        """All ranks together may weigh nothing, as they then send zeros only."""
        self.digest: int | None = None
        """Of the weights before the step; None if nobody watches."""
        self.compared: tuple[int, Collection[int]] | None = None
        """The step, and its members, whose digests are to be compared."""

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
        self.weight = None
        self.is_loaded = leaving.slot is not None

    def watch(self, weights: Digest) -> None:
        """Let a digest of `weights` before the step that begins ride too; on a GPU, compare the
        last ones first.
        """
        self.compare()
        self.digest = weights.now()
        self.is_watched = True

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
        self.write()

    def read(self) -> Slots:
        """Return what all ranks have sent in the latest step; on a GPU this waits for the sum."""
        area = self._area
        if self.share is not None:
            # of what this rank itself said, a 1
            self.share = float(area[self._rank * SLOT.itemsize])
            area = area / self.share
        return area.to("cpu", torch.uint8).numpy().view(SLOT)

    def total_weight(self) -> float | None:
        """Return what all gradients that came together weigh; None where none is weighed. The same
        on all their ranks.

        Raises `DisagreementError` if they weigh nothing and may not.
        """
        slots = self.read()
        weighing = (slots["flags"] & WEIGHS) != 0
        if not weighing.any():
            return None
        total = float(slots["weight"][weighing].sum())
        if not total and self.may_weigh_nothing:
            return None
        if not total:
            raise DisagreementError(
                "the gradients of all ranks together weigh nothing, so they have no mean: leave"
                " such a step out on all ranks"
            )
        self.weight = total
        return total

    def compare(self) -> None:
        """Raise `DisagreementError` if ranks that sent digests in the latest step had other weights
        than each other.
        """
        if self.compared is None:
            return
        (step, members), self.compared = self.compared, None
        slots = self.read()
        require_equal({rank: int(slots["digest"][rank]) for rank in members}, step)


def require_equal(digests: Mapping[int, int], step: int) -> None:
    """Raise `DisagreementError` if ranks have different `digests` of the weights before `step`."""
    (common, count), *others = Counter(digests.values()).most_common()
    if others:
        alone = [rank for rank, digest in digests.items() if digest != common]
        is_most = 2 * count > len(digests)
        who = (
            f"those of ranks {alone} differ from all others'"
            if is_most
            else f"their digests are {digests}"
        )
        raise DisagreementError(
            f"watch: before step {step} the ranks held different weights for the first time: {who}."
            " Bits were flipped, on a wire or in memory, or a rank alone has written weights or"
            " loaded a state: start again from a checkpoint, and look at the hosts of these ranks"
            " and of those that send to them"
        )
