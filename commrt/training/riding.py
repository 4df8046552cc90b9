# SPDX-License-Identifier: Apache-2.0
"""What a loop sends along with its gradients, and what came back: numbers, weights, and the wish to stop or to skip."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import frexp, inf, ldexp, nan
from typing import NamedTuple

import numpy as np
from torch import Tensor

from commrt.buckets.gradient_bucket import UNKNOWN
from commrt.buckets.riders import EMPTY, MOST_NUMBERS, SKIP, SLOT, STOP, WEIGHS, Leaving, Riders, Slots
from commrt.errors import DisagreementError, UsageError
from commrt.training.hooks import ATTRIBUTE, current_pass

NOTHING = np.zeros(0, SLOT)
FEEDBACK = "a wire that feeds back what rounding lost, which would weigh as the step before: use one without feedback"
FP16_MIX = "gossip in float16, whose range weights leave: use wire=torch.bfloat16"
NO_PASS = -1
"""As autograd says outside of a pass."""
NO_NUMBERS: Mapping[str, float] = {}
Seen = tuple[int, int, float]
"""Steps that a rank has made alone, how many of them were weighed, and by how much together."""


class Rode(NamedTuple):
    """A number that rode along, of each rank that sent it."""

    by_rank: Mapping[int, float]

    @property
    def sum(self) -> float:
        """The sum over the ranks that sent it, in float64, in their order: the same on all ranks."""
        return sum(self.by_rank.values())

    @property
    def mean(self) -> float:
        """The mean over the ranks that sent it; NaN, as the next two, if no rank did."""
        return self.sum / len(self.by_rank) if self.by_rank else nan

    @property
    def min(self) -> float:
        """The smallest."""
        return min(self.by_rank.values(), default=nan)

    @property
    def max(self) -> float:
        """The largest."""
        return max(self.by_rank.values(), default=nan)


class Begun(NamedTuple):
    """The latest backward pass of losses that weigh."""

    number: int
    weight: float
    on_means: bool
    """It began while ``param.grad`` held averages."""


class Riding:
    """What one rank sends along in its next step, and what all ranks sent in the latest one.

    All methods belong to the thread that trains.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[str, float] = {}
        self._sent: tuple[str, ...] = ()  # names of the numbers that came last
        self._skips = False
        self.wants_stop = False
        """This rank has asked to stop, which rides in each step from then on; set on any thread, and by signals."""
        self._weight: float | None = None  # of the gradients at hand; None if they do not weigh
        self.passes = 0
        """Backward passes whose sum the gradients at hand are, as far as they were counted."""
        self._counted = NO_PASS  # the latest of them
        self._begun = Begun(NO_PASS, 0.0, False)
        self._unit = 1.0  # by which they are divided, so that they stay as large as their mean; equal on all ranks
        self.steps = 0
        """Of a rank that trains alone."""
        self._weighed_steps, self._total = 0, 0.0
        self.unread: Riders | None = None
        """What came in the latest step and was not read."""
        self.is_idle = True
        """True if nothing rides in the next step, but perhaps the wish to stop, and nothing rode in the latest."""
        self.known_to_stop: tuple[int, ...] = ()
        """`stopping`, as far as it was read."""
        self._slots = NOTHING

    def skip(self) -> None:
        """Let the wish to skip ride in the next step."""
        self._skips, self.is_idle = True, False

    def ride(self, numbers: Mapping[str, float]) -> None:
        """Let `numbers` ride in the next step, with those given before."""
        merged = self._numbers | {name: require_number(f"ride({name}=)", number) for name, number in numbers.items()}
        if len(merged) > MOST_NUMBERS:
            raise UsageError(f"{len(merged)} numbers ride in one step, and {MOST_NUMBERS} is the most")
        self._numbers, self.is_idle = merged, False

    def weigh(self, loss: Tensor, weight: float, times: float, holds_means: Callable[[], bool]) -> None:
        """Let the backward pass of `loss` multiply its gradients by `times`, and count for `weight`.

        It asks `holds_means` where it begins. Raises `UsageError` for a loss that weighs already.
        """
        if ATTRIBUTE in vars(loss):
            raise UsageError(
                "weigh() of a loss that weighs already: call it once for each loss; attach models that share a loss as "
                "one, in an nn.ModuleList"
            )
        vars(loss)[ATTRIBUTE] = weight

        def begin(grad: Tensor) -> Tensor:
            number, begun = current_pass(), self._begun
            earlier = begun.weight if begun.number == number else 0.0
            self._begun, self.is_idle = Begun(number, earlier + weight, holds_means()), False
            return grad * (times / self._unit)

        if loss.requires_grad:
            loss.register_hook(begin)  # type: ignore[no-untyped-call]  # torch's

    def count_pass(self, number: int) -> None:
        """Note that backward pass `number` adds to the gradients at hand; a pass of `autograd.grad` does not.

        Raises `UsageError` if it weighs and those before it do not, or the other way round, or if they are averages.
        """
        if number == self._counted:
            return
        begun = self._begun if self._begun.number == number else None
        if begun is not None and begun.on_means:
            raise UsageError(
                "the backward pass of a loss that weighs added to averages that no optimizer has used: put all but the "
                "last pass of an accumulation into replica.no_sync(), and set what you skip to None (zero_grad())"
            )
        weight = None if begun is None else begun.weight
        if self.passes and (weight is None) != (self._weight is None):
            raise UsageError(
                "replica.weigh() in some backward passes of an accumulation and not in others: call it for the loss of "
                "each, and zero_grad() where the gradients of earlier ones are not to be used"
            )
        self._counted, self.is_idle = number, False
        self.passes += 1
        self._weight = None if weight is None else (self._weight or 0.0) + weight

    def leave(self, number: int | None, *, is_mixed: bool = False) -> Leaving:
        """Return what rides in the step of backward pass `number`; something in any case if it `is_mixed`.

        A rank that had no backward pass is told what the others' gradients weigh.
        """
        if number is not None:
            self.count_pass(number)
        weighed = int(self._weight is not None) if self.passes else UNKNOWN
        return self.leave_with(self._take_weight() or 0.0, weighed, self._unit, anyway=is_mixed)

    def leave_with(self, weight: float, weighed: int, unit: float, *, anyway: bool = False) -> Leaving:
        """Return what rides, with gradients that are `weighed`, or are not, or of which nothing is known."""
        flags = STOP * self.wants_stop | SKIP * self._skips
        leaving = _leaving(weight, weighed, unit, flags=flags, numbers=self._numbers, anyway=anyway)
        self._numbers, self._skips, self.is_idle = {}, False, leaving.slot is None
        return leaving

    @property
    def seen(self) -> Seen:
        """What this rank has made alone."""
        return self.steps, self._weighed_steps, self._total

    def seen_since(self, before: Seen) -> Seen:
        """Return what came to `seen` since it was `before`."""
        return self.steps - before[0], self._weighed_steps - before[1], self._total - before[2]

    def seen_before(self, since: Seen) -> Seen:
        """Return what `seen` was before so much came."""
        return self.seen_since(since)

    def leave_since(self, before: Seen, *, with_numbers: bool) -> tuple[float, Leaving]:
        """Return what this rank's steps since it had `seen` weigh, 1 if they do not, and what rides with them.

        Weights ride in any case, and all else `with_numbers`. Raises `UsageError` if only some steps were weighed.
        """
        steps, weighed_steps, total = self.seen_since(before)
        if weighed_steps not in (0, steps):
            raise UsageError(
                f"replica.weigh() in {weighed_steps} of the {steps} steps of a period: call it for the loss of each "
                "backward pass"
            )
        weighed = UNKNOWN if not steps else int(weighed_steps > 0)
        leaving = self.leave_with(total, weighed, 1.0) if with_numbers else _leaving(total, weighed, 1.0)
        return (total if weighed == 1 else 1.0), leaving

    def end_step(self, number: int) -> float | None:
        """Return what makes a mean of the gradients of a step that this rank makes alone; None if they do not weigh.

        The step is that of backward pass `number`.
        """
        self.count_pass(number)
        if (weight := self._take_weight()) is None:
            return None
        self._weighed_steps, self._total = self._weighed_steps + 1, self._total + weight
        factor = self._unit / weight if weight else None
        self.use_unit(weight)
        return factor

    def forget_passes(self) -> None:
        """Forget what gradients weigh that nobody will use."""
        self.passes, self._weight = 0, None

    def _take_weight(self) -> float | None:
        """Return what the gradients at hand weigh, which become averages."""
        weight = self._weight
        self.forget_passes()
        return weight

    def use_unit(self, unit: float) -> None:
        """Divide later gradients by about `unit`, a power of two, so that no bit of their mean follows from it.

        Where gradients are averaged, it is the same on all ranks of later steps.
        """
        self._unit = ldexp(0.5, frexp(unit)[1]) if unit else self._unit

    def drop(self) -> None:
        """Forget the gradients at hand, and what was to ride with them; nothing came."""
        self._numbers, self._skips = {}, False
        self.forget_passes()
        self._slots, self.unread = NOTHING, None

    def read(self) -> None:
        """Read what came in the latest step, if that was not done; on a GPU this waits for the first bucket's sum."""
        if self.unread is not None:
            self._sent = self.unread.leaving.names
            self._slots, self.unread = self.unread.read(), None
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

        Raises `DisagreementError` if other ranks sent others: only this rank's names are known here.
        """
        self.read()
        said = {rank: slot for rank, slot in enumerate(self._slots) if slot["names"]} if self._sent else {}
        for rank, slot in said.items():
            if slot["names"] != _digest(self._sent):
                raise DisagreementError(
                    f"rank {rank} lets other numbers ride than rank {self._rank}, which lets ride {[*self._sent]}: "
                    "give the same names in the same step on all ranks that give any"
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
        slot["present"], slot["names"], slot["flags"], slot["weight"] = 1, _digest(names), flags, weight
    return Leaving(slot, unit if weighed else None, weighed, names)


def ranks_with(flag: int, slots: Slots) -> tuple[int, ...]:
    """Return the ranks whose slots have `flag`."""
    return tuple(np.flatnonzero(slots["flags"] & flag).tolist())


def require_number(what: str, number: object) -> float:
    """Return `number` as a float; raise `UsageError` if it is none, or lies on a GPU."""
    if isinstance(number, Tensor) and number.numel() == 1 and number.device.type == "cpu":
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, int | float | np.number):
        raise UsageError(f"{what} needs a number on the host and got {number!r:.60}: of a tensor on a GPU its item()")
    try:
        return float(number)
    except (OverflowError, TypeError) as error:  # of an int that is too large, of a complex number
        raise UsageError(f"{what} needs a real number of float64 and got {number!r:.60}") from error


def require_weight(weight: object) -> float:
    """Return `weight` as a float; raise `UsageError` if it is no weight."""
    found = require_number("weigh()", weight)
    if not 0 <= found < inf:
        raise UsageError(
            f"weigh() with {found}: a weight is finite and not negative, such as the tokens that a loss is the mean of"
        )
    return found


def _digest(names: tuple[str, ...]) -> int:
    """Return 32 bits of `names`, not 0 if there are any."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0
