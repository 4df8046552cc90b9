# SPDX-License-Identifier: Apache-2.0
"""What a loop sends along with its gradients, and what came back; buckets carry it.

Numbers, the wish to stop or to skip, and what the gradients weigh, which `gradient_weights` knows.
It sends nothing itself. Used on the thread that trains, or that of its backward pass; any thread
may set `Riding.wants_stop`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
from commrt.errors import DisagreementError, UsageError
from commrt.runtime.untraced import untraced
from commrt.training.gradient_weights import GradientWeights
from commrt.training.host_number import require_number
from commrt.training.own_steps import OwnSteps

NOTHING = np.zeros(0, SLOT)
NO_NUMBERS: Mapping[str, float] = {}
NOBODY = -1
"""In place of a rank that has asked to stop."""
FLAG_OF = {0: 0, 1: WEIGHS, UNKNOWN: EMPTY}
"""What a slot says of weights, by `Header.weighed`."""


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
class Riding:
    """What one rank sends along in its next step, and what all ranks sent in the latest one.

    Replicas, and `BackupStep` and `Standing` of backup workers, call it on the thread that trains,
    or that of its backward pass. Of other objects it writes `weights`: it takes what gradients
    weigh when they leave, and sets `is_idle`.
    """

    def __init__(self, rank: int, weights: GradientWeights) -> None:
        self.weights = weights
        self._rank = rank
        self._numbers: dict[str, float] = {}  # that ride in the next step
        self._replaceable = set[str]()  # names of those of an earlier step of the period
        self._step = 0  # in which numbers were given, where a period has several
        self._skips = False  # the wish to skip rides in the next step
        self._is_idle = True  # neither rides, and nothing did in the latest step
        self.wants_stop = False
        """True once this rank has asked to stop; rides in each step.

        Any thread may set it, such as a signal handler's (`Replica.stop`) or that of a server
        (`CatchUp`); nobody sets it back.
        """
        self._unread: Riders | None = None  # of the latest step, where nobody has read them
        self._slots = NOTHING  # the latest that were read
        self._sent: tuple[str, ...] = ()  # names of this rank's numbers in them
        self.known_to_stop: tuple[int, ...] = ()
        """`stopping`, as far as it was read; others only read it (`hear_of_stop`)."""

    def skip(self) -> None:
        """Let the wish to skip ride in the next step."""
        self._skips = True
        self._is_idle = False

    def begin_step(self, step: int) -> None:
        """Let numbers given in `step` replace those of an earlier one, which have not left."""
        if step != self._step:
            self._step = step
            self._replaceable = {*self._numbers}

    def ride(self, numbers: Mapping[str, float]) -> None:
        """Let `numbers` ride in the next step, with those of other names given before."""
        merged = self._numbers | {
            name: require_number(f"ride({name}=)", number) for name, number in numbers.items()
        }
        if again := sorted(self._numbers.keys() & numbers.keys() - self._replaceable):
            raise UsageError(
                f"ride({again[0]}=) twice in one step, which sends one number of each name: if you"
                f" accumulate, add up your passes in a variable, as in {again[0]} += ..., and call"
                " ride() once, before the last backward()"
            )
        if len(merged) > MOST_NUMBERS:
            raise UsageError(
                f"{len(merged)} numbers ride in one step, and {MOST_NUMBERS} is the most"
            )
        self._numbers = merged
        self._replaceable -= numbers.keys()
        self._is_idle = False

    def leave_with_gradients(self, number: int | None, *, is_mixed: bool = False) -> Leaving | None:
        """Return what rides with the gradients of pass `number`, None for a step without a pass.

        Returns None if nothing does and not `is_mixed`. A rank that had no backward pass is told
        what the others' gradients weigh.
        """
        weights = self.weights
        if (
            number is not None
            and self._is_idle
            and weights.is_idle
            and not (self.wants_stop or is_mixed)
        ):
            return None
        taken = weights.leave(number)
        weighed = int(taken.weight is not None) if taken.passes else UNKNOWN
        return self._leave(taken.weight or 0.0, weighed, weights.unit, anyway=is_mixed)

    def leave_with_period(self, made: OwnSteps, *, with_numbers: bool) -> tuple[float, Leaving]:
        """Return what the steps `made` in a period weigh, 1 if they do not, and what rides.

        Weights ride in any case, and all else `with_numbers`. Raises `UsageError` if only some
        steps were weighed.
        """
        steps, weighed_steps, total, _ = made
        if weighed_steps not in (0, steps):
            raise UsageError(
                f"replica.weigh() in {weighed_steps} of the {steps} steps of a period: call it for"
                " the loss of each backward pass"
            )
        weighed = int(weighed_steps > 0) if steps else UNKNOWN
        if with_numbers:
            leaving = self._leave(total, weighed, 1.0)
        else:
            leaving = _leaving(total, weighed, 1.0)
        return (total if weighed == 1 else 1.0), leaving

    def leave_again(self, weight: float) -> Leaving:
        """Return what rides with a period that a checkpoint holds, whose steps were weighed."""
        return self._leave(weight, 1, 1.0)

    def _leave(self, weight: float, weighed: int, unit: float, *, anyway: bool = False) -> Leaving:
        """Return what rides, see `_leaving`; numbers and the wish to skip do so once."""
        flags = 0
        if self.wants_stop:
            flags |= STOP
        if self._skips:
            flags |= SKIP
        leaving = _leaving(weight, weighed, unit, flags=flags, numbers=self._numbers, anyway=anyway)
        self._numbers = {}
        self._skips = False
        self._is_idle = leaving.slot is None
        self.weights.is_idle = self._is_idle
        return leaving

    def drop(self) -> None:
        """Forget what was to ride with the next step; nothing came."""
        self._numbers = {}
        self._skips = False
        self._slots = NOTHING
        self._unread = None

    def drop_gradients(self) -> None:
        """Forget the gradients at hand, and what was to ride with them."""
        self.weights.take()
        self.drop()

    def arrive(self, riders: Riders | None) -> None:
        """Note that a step has ended, with whose first bucket `riders` came."""
        self._unread = riders

    def keep(self) -> None:
        """Copy what came in the latest step, once; a GPU waits for the first bucket's sum.

        Before other buckets use that memory; else who asks for it does this.
        """
        if self._unread is not None:
            self._sent = self._unread.leaving.names
            self._slots = self._unread.read()
            self._unread = None
            self.known_to_stop = self.known_to_stop or ranks_with(STOP, self._slots)

    @property
    def stopping(self) -> tuple[int, ...]:
        """The ranks that have asked to stop, in the first step in which any has."""
        self.keep()
        return self.known_to_stop

    def asker(self) -> int:
        """Return a rank that has asked to stop, as far as this one knows; `NOBODY` if none has."""
        if self.stopping:
            return self.known_to_stop[0]
        return self._rank if self.wants_stop else NOBODY

    def hear_of_stop(self, ranks: Iterable[int]) -> None:
        """Note which `ranks` have asked to stop, as others know of steps that this rank missed."""
        self.known_to_stop = tuple(ranks)

    @property
    def skipping(self) -> tuple[int, ...]:
        """The ranks that asked to skip the latest step."""
        self.keep()
        return ranks_with(SKIP, self._slots)

    @property
    def rode(self) -> Mapping[str, Rode]:
        """The numbers of the latest step, by name, on a rank that sent some.

        Raises `DisagreementError` if other ranks sent others: only this rank's names are known
        here.
        """
        self.keep()
        rode = defaultdict[str, Rode](lambda: Rode({}))
        if not self._sent:
            return rode
        said = {rank: slot for rank, slot in enumerate(self._slots) if slot["names"]}
        for rank, slot in said.items():
            if slot["names"] != _digest(self._sent):
                raise DisagreementError(
                    f"rank {rank} lets other numbers ride than rank {self._rank}, which lets ride"
                    f" {[*self._sent]}: give the same names in the same step on all ranks that"
                    " give any"
                )
        if said:
            for place, name in enumerate(self._sent):
                by_rank = {rank: float(slot["numbers"][place]) for rank, slot in said.items()}
                rode[name] = Rode(by_rank)
        return rode


def _leaving(
    weight: float,
    weighed: int,
    unit: float,
    *,
    flags: int = 0,
    numbers: Mapping[str, float] = NO_NUMBERS,
    anyway: bool = False,
) -> Leaving:
    """Return what rides for one rank; its slot is None if there is nothing in it and not `anyway`.

    `weighed` is `Header.weighed`: 1 if the gradients are, 0 if they are not, `UNKNOWN` without any.
    """
    flags |= FLAG_OF[weighed]
    slot: Slots | None = None
    names = tuple(sorted(numbers))
    if names or flags or anyway:
        slot = np.zeros((), SLOT)
        slot["numbers"] = [*map(numbers.__getitem__, names), *[nan] * (MOST_NUMBERS - len(names))]
        slot["present"] = 1
        slot["names"] = _digest(names)
        slot["flags"] = flags
        slot["weight"] = weight
    return Leaving(slot, unit if weighed else None, weighed, names)


def ranks_with(flag: int, slots: Slots) -> tuple[int, ...]:
    """Return the ranks whose slots have `flag`."""
    return tuple(np.flatnonzero(slots["flags"] & flag).tolist())


def _digest(names: tuple[str, ...]) -> int:
    """Return 32 bits of `names`, not 0 if there are any."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0
