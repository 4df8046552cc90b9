# SPDX-License-Identifier: Apache-2.0
"""What a loop sends along with its gradients, and what came back; buckets carry it.

Numbers, the wish to stop or to skip, and what the gradients weigh. It sends nothing itself. Used on
the thread that trains.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import nan
from typing import NamedTuple

import numpy as np

from commrt.buckets.header import UNKNOWN
from commrt.buckets.riders import (
    EMPTY,
    MOST_NUMBERS,
    SKIP,
    SLOT,
    STOP,
    WEIGHS,
    Leaving,
    Riders,
    Slots,
)
from commrt.buckets.tensors import Named
from commrt.errors import DisagreementError, UsageError
from commrt.runtime.untraced import untraced
from commrt.training.gradient_weights import GradientWeights, require_number

NOTHING = np.zeros(0, SLOT)
FEEDBACK = (
    "a wire that feeds back what rounding lost, which would weigh as the step before: use one"
    " without feedback"
)
NO_NUMBERS: Mapping[str, float] = {}


class Rode(NamedTuple):
    """A number that rode along, of each rank that sent it."""

    by_rank: Mapping[int, float]

    @property
    def sum(self) -> float:
        """The sum over the ranks that sent it, float64 in their order: the same on all ranks."""
        return sum(self.by_rank.values())

    @property
    def mean(self) -> float:
        """The mean over the ranks that sent it; NaN, as the next two, if no rank did."""
        return self.sum / len(self.by_rank) if self.by_rank else nan

    @property
    def min(self) -> float:
        """The smallest of them."""
        return min(self.by_rank.values(), default=nan)

    @property
    def max(self) -> float:
        """The largest of them."""
        return max(self.by_rank.values(), default=nan)


@untraced
class Riding(GradientWeights):
    """What one rank sends along in its next step, and what all ranks sent in the latest one."""

    def __init__(self, rank: int, params: Sequence[Named]) -> None:
        super().__init__(params)
        self._rank = rank
        self._numbers: dict[str, float] = {}
        self._sent: tuple[str, ...] = ()  # names of the numbers that came last
        self._skips = False
        self.wants_stop = False
        """True once this rank has asked to stop; rides in each step. Any thread may set it."""
        self.unread: Riders | None = None
        """What came in the latest step and was not read."""
        self.known_to_stop: tuple[int, ...] = ()
        """`stopping`, as far as it was read."""
        self._slots = NOTHING

    def skip(self) -> None:
        """Let the wish to skip ride in the next step."""
        self._skips = True
        self.is_idle = False

    def ride(self, numbers: Mapping[str, float]) -> None:
        """Let `numbers` ride in the next step, with those given before."""
        merged = self._numbers | {
            name: require_number(f"ride({name}=)", number) for name, number in numbers.items()
        }
        if len(merged) > MOST_NUMBERS:
            raise UsageError(
                f"{len(merged)} numbers ride in one step, and {MOST_NUMBERS} is the most"
            )
        self._numbers = merged
        self.is_idle = False

    def leave(self, number: int | None, *, is_mixed: bool = False) -> Leaving | None:
        """Return what rides in the step of pass `number`; None if nothing does and not `is_mixed`.

        A rank that had no backward pass is told what the others' gradients weigh.
        """
        if number is not None and self.is_idle and not (self.wants_stop or is_mixed):
            return None
        if number is not None:
            self.count_pass(number)
            self._left = number
        at_hand = self._take_gradients()
        weighed = int(at_hand.weight is not None) if at_hand.passes else UNKNOWN
        return self.leave_with(at_hand.weight or 0.0, weighed, self._unit, anyway=is_mixed)

    def leave_with(
        self, weight: float, weighed: int, unit: float, *, anyway: bool = False
    ) -> Leaving:
        """Return what rides with gradients; `weighed` is 1 if they are, 0 if not, or `UNKNOWN`."""
        flags = STOP * self.wants_stop | SKIP * self._skips
        leaving = _leaving(weight, weighed, unit, flags=flags, numbers=self._numbers, anyway=anyway)
        self._numbers = {}
        self._skips = False
        self.is_idle = leaving.slot is None
        return leaving

    def leave_since(
        self, before: tuple[int, int, float], *, with_numbers: bool
    ) -> tuple[float, Leaving]:
        """Return what this rank's steps since `before` weigh, 1 if they do not, and what rides.

        Weights ride in any case, and all else `with_numbers`. Raises `UsageError` if only some
        steps were weighed.
        """
        steps, weighed_steps, total = self.seen.since(before)
        if weighed_steps not in (0, steps):
            raise UsageError(
                f"replica.weigh() in {weighed_steps} of the {steps} steps of a period: call it for"
                " the loss of each backward pass"
            )
        weighed = UNKNOWN if not steps else int(weighed_steps > 0)
        leaving = (
            self.leave_with(total, weighed, 1.0) if with_numbers else _leaving(total, weighed, 1.0)
        )
        return (total if weighed == 1 else 1.0), leaving

    def drop(self) -> None:
        """Forget what was to ride with the next step; nothing came."""
        self._numbers = {}
        self._skips = False
        self._slots = NOTHING
        self.unread = None

    def drop_gradients(self) -> None:
        """Forget the gradients at hand, and what was to ride with them."""
        self._take_gradients()
        self.drop()

    def read(self) -> None:
        """Read what came in the latest step, once; a GPU waits for the first bucket's sum."""
        if self.unread is not None:
            self._sent = self.unread.leaving.names
            self._slots = self.unread.read()
            self.unread = None
            self.known_to_stop = self.known_to_stop or ranks_with(STOP, self._slots)

    @property
    def stopping(self) -> tuple[int, ...]:
        """The ranks that have asked to stop, in the first step in which any has."""
        self.read()
        return self.known_to_stop

    @property
    def skipping(self) -> tuple[int, ...]:
        """The ranks that asked to skip the latest step."""
        self.read()
        return ranks_with(SKIP, self._slots)

    @property
    def rode(self) -> Mapping[str, Rode]:
        """The numbers of the latest step, by name, on a rank that sent some.

        Raises `DisagreementError` if other ranks sent others: only this rank's names are known
        here.
        """
        self.read()
        said = (
            {rank: slot for rank, slot in enumerate(self._slots) if slot["names"]}
            if self._sent
            else {}
        )
        for rank, slot in said.items():
            if slot["names"] != _digest(self._sent):
                raise DisagreementError(
                    f"rank {rank} lets other numbers ride than rank {self._rank}, which lets ride"
                    f" {[*self._sent]}: give the same names in the same step on all ranks that"
                    " give any"
                )
        return defaultdict(
            lambda: Rode({}),
            {
                name: Rode({rank: float(slot["numbers"][place]) for rank, slot in said.items()})
                for place, name in enumerate(self._sent)
                if said
            },
        )


def _leaving(
    weight: float,
    weighed: int,
    unit: float,
    *,
    flags: int = 0,
    numbers: Mapping[str, float] = NO_NUMBERS,
    anyway: bool = False,
) -> Leaving:
    flags |= (0, WEIGHS, EMPTY)[weighed]
    slot: Slots | None = None
    names = tuple(sorted(numbers))
    if names or flags or anyway:
        slot = np.zeros((), SLOT)
        slot["numbers"] = [*map(numbers.__getitem__, names), *[nan] * (MOST_NUMBERS - len(names))]
        slot["present"], slot["names"], slot["flags"], slot["weight"] = (
            1,
            _digest(names),
            flags,
            weight,
        )
    return Leaving(slot, unit if weighed else None, weighed, names)


def ranks_with(flag: int, slots: Slots) -> tuple[int, ...]:
    """Return the ranks whose slots have `flag`."""
    return tuple(np.flatnonzero(slots["flags"] & flag).tolist())


def _digest(names: tuple[str, ...]) -> int:
    """Return 32 bits of `names`, not 0 if there are any."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0
