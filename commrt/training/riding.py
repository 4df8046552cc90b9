# SPDX-License-Identifier: Apache-2.0
"""What a loop sends along with its gradients, and what came back: numbers, weights, and the wish to
stop or to skip.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import frexp, ldexp, nan
from typing import NamedTuple

import numpy as np
from torch import Tensor

from commrt.buckets.header import UNKNOWN
from commrt.buckets.layout import Named
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
from commrt.training.hooks import ATTRIBUTE, NO_PASS, at_end_of_backward, current_pass

NOTHING = np.zeros(0, SLOT)
FEEDBACK = (
    "a wire that feeds back what rounding lost, which would weigh as the step before: use one"
    " without feedback"
)
NO_NUMBERS: Mapping[str, float] = {}
MOST = 2.0**53
"""No weight is larger."""


class Seen(NamedTuple):
    """What a rank has made alone."""

    steps: int = 0
    weighed_steps: int = 0
    weight: float = 0.0

    def since(self, before: tuple[int, int, float]) -> Seen:
        """Return what came since it was `before`."""
        return Seen(self.steps - before[0], self.weighed_steps - before[1], self.weight - before[2])

    def plus(self, more: Seen) -> Seen:
        """Return both together."""
        return Seen(
            self.steps + more.steps,
            self.weighed_steps + more.weighed_steps,
            self.weight + more.weight,
        )


NOTHING_SEEN = Seen()
ONE_STEP = Seen(1)


class Rode(NamedTuple):
    """A number that rode along, of each rank that sent it."""

    by_rank: Mapping[int, float]

    @property
    def sum(self) -> float:
        """The sum over the ranks that sent it, in float64, in their order:
        the same on all ranks.
        """
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


@untraced
class Accumulation:
    """What the gradients at hand weigh, the sum of backward passes that were not averaged yet."""

    def __init__(self) -> None:
        self.passes = 0
        """As far as they were counted."""
        self.weight: float | None = None
        """None if they do not weigh."""
        self.reference = 0.0
        """By what gradients are divided, so that they stay as large as a mean: about the first
        weight; 0 before.
        """
        # each parameter, and which gradient it had, written how often
        self._grads: list[tuple[Tensor, int, int]] = []

    def note(self, params: Sequence[Named]) -> None:
        """Remember what the latest pass has left in the gradients of `params`."""
        self._grads = [
            (param, *_state(param.grad)) for _, param in params if param.grad is not None
        ]

    def was_thrown_away(self) -> bool:
        """Return True if a gradient was removed or replaced since `note`, or some were set to
        zeros.

        Zeros that a pass has made are gradients that count.
        """
        now = [(param.grad, before) for param, *before in self._grads]
        if any(grad is None or grad._cdata != number for grad, (number, _) in now):  # noqa: SLF001
            return True
        written = [grad for grad, before in now if grad is not None and [*_state(grad)] != before]
        return bool(written) and not any(grad.any() for grad in written)


def _state(grad: Tensor) -> tuple[int, int]:
    return grad._cdata, grad._version  # noqa: SLF001  # nothing else tells


@untraced
class Riding:
    """What one rank sends along in its next step, and what all ranks sent in the latest one.

    All methods belong to the thread that trains.
    """

    def __init__(self, rank: int, params: Sequence[Named]) -> None:
        self._rank = rank
        self._params = params
        self._numbers: dict[str, float] = {}
        self._sent: tuple[str, ...] = ()  # names of the numbers that came last
        self._skips = False
        self.wants_stop = False
        """This rank has asked to stop, which rides in each step from then on; set on any thread,
        and by signals.
        """
        self._at_hand = Accumulation()
        # the latest pass of losses that weigh
        self._begun = NO_PASS
        self._coming = 0.0
        self._is_refused = False
        # the latest passes that were counted, and whose step has begun
        self._counted = self._left = NO_PASS
        self._unit = 1.0  # by which gradients are divided where they travel; equal on all ranks
        self.seen = NOTHING_SEEN
        """What this rank has made alone, in steps that optimizers have used."""
        self.made = NOTHING_SEEN
        """In the latest step, which no optimizer has used."""
        self.unread: Riders | None = None
        """What came in the latest step and was not read."""
        self.is_idle = True
        """True if nothing rides in the next step, but perhaps the wish to stop, and nothing rode in
        the latest.
        """
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

    def weigh(
        self, loss: object, weight: object, reduction: str, holds_means: Callable[[], bool]
    ) -> None:
        """Let the backward pass of `loss` count for `weight`; see `Replica.weigh`.

        It asks `holds_means` where it begins. Raises `UsageError` also for a loss that weighs
        already.
        """
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"weigh({loss!r:.40}, ...): give the loss, a tensor, first, and then what it weighs"
            )
        found = _require_weight(weight)
        if reduction not in ("mean", "sum"):
            raise UsageError(f'weigh(reduction={reduction!r}): the loss is a "mean" or a "sum"')
        times = found if reduction == "mean" else 1.0
        if ATTRIBUTE in vars(loss):
            raise UsageError(
                "weigh() of a loss that weighs already: call it once for each loss; attach models"
                " that share a loss as one, in an nn.ModuleList"
            )
        vars(loss)[ATTRIBUTE] = found

        def begin(grad: Tensor) -> Tensor:
            self._begin(current_pass(), found, holds_means)
            return grad * (times / (self._at_hand.reference or 1.0))

        if loss.requires_grad:
            loss.register_hook(begin)  # type: ignore[no-untyped-call]  # torch's

    def _begin(self, number: int, weight: float, holds_means: Callable[[], bool]) -> None:
        """Note that backward pass `number` runs through a loss of this `weight`."""
        if number == self._left:
            raise UsageError(
                "losses that weigh, of which one began when gradients of another had left, in one"
                " backward pass: weigh each in a pass of its own, all but the last in no_sync()"
            )
        if number != self._begun:
            self.forget_thrown_away()
            self._begun = number
            self._coming = 0.0
            self._is_refused = not self._at_hand.passes and holds_means()
            at_end_of_backward(self._note)
        self._coming = self._coming + weight
        self.is_idle = False
        self._at_hand.reference = self._at_hand.reference or (
            ldexp(0.5, frexp(weight)[1]) if weight else 0.0
        )

    def _note(self) -> None:
        if self._at_hand.passes:
            self._at_hand.note(self._params)

    def count_pass(self, number: int) -> None:
        """Note that backward pass `number` adds to the gradients at hand; a pass of `autograd.grad`
        does not.

        Raises `UsageError` if it weighs and those before it do not, or the other way round, or if
        they are averages.
        """
        if number == self._counted:
            return
        weighs = number == self._begun
        at_hand = self._at_hand
        if weighs and self._is_refused:
            raise UsageError(
                "the backward pass of a loss that weighs added to averages that no optimizer has"
                " used: put all but the last pass of an accumulation into replica.no_sync(), and"
                " set what you skip to None (zero_grad())"
            )
        if at_hand.passes and weighs != (at_hand.weight is not None):
            raise UsageError(
                "replica.weigh() in some backward passes of an accumulation and not in others: call"
                " it for the loss of each, and zero_grad() where the gradients of earlier ones are"
                " not to be used"
            )
        self._counted = number
        self.is_idle = False
        at_hand.passes += 1
        if weighs:
            at_hand.weight = (at_hand.weight or 0.0) + self._coming

    @property
    def own_weight(self) -> float:
        """By what the gradients at hand are multiplied where they travel."""
        at_hand = self._at_hand
        return 1.0 if at_hand.weight is None else (at_hand.reference or 1.0) / self._unit

    @property
    def has_passes(self) -> bool:
        """True if gradients of backward passes are at hand that were not averaged."""
        return self._at_hand.passes > 0

    def leave(self, number: int | None, *, is_mixed: bool = False) -> Leaving:
        """Return what rides in the step of backward pass `number`; something in any case if it
        `is_mixed`.

        A rank that had no backward pass is told what the others' gradients weigh.
        """
        if number is not None:
            self.count_pass(number)
            self._left = number
        at_hand = self._take_gradients()
        weighed = int(at_hand.weight is not None) if at_hand.passes else UNKNOWN
        return self.leave_with(at_hand.weight or 0.0, weighed, self._unit, anyway=is_mixed)

    def leave_with(
        self, weight: float, weighed: int, unit: float, *, anyway: bool = False
    ) -> Leaving:
        """Return what rides, with gradients that are `weighed`, or are not, or of which nothing is
        known.
        """
        flags = STOP * self.wants_stop | SKIP * self._skips
        leaving = _leaving(weight, weighed, unit, flags=flags, numbers=self._numbers, anyway=anyway)
        self._numbers = {}
        self._skips = False
        self.is_idle = leaving.slot is None
        return leaving

    def leave_since(
        self, before: tuple[int, int, float], *, with_numbers: bool
    ) -> tuple[float, Leaving]:
        """Return what this rank's steps since it had `seen` weigh, 1 if they do not, and what rides
        with them.

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

    def end_step(self, number: int | None) -> float | None:
        """Return what makes a mean of the gradients of a step that this rank makes alone; None if
        they do not weigh.

        The step is that of backward pass `number`, or of those in `no_sync` before it. It counts
        once it was used.
        """
        if number is not None:
            self.count_pass(number)
        at_hand = self._take_gradients()
        self.made = Seen(1, int(at_hand.weight is not None), at_hand.weight or 0.0)
        return (at_hand.reference or 1.0) / at_hand.weight if at_hand.weight else None

    def use_step(self) -> None:
        """Note that an optimizer has used the gradients of the latest step."""
        made = self.made
        self.made = NOTHING_SEEN
        self.seen = self.seen.plus(made)

    def forget_thrown_away(self) -> None:
        """Forget what gradients weigh that nobody will use."""
        is_none_left = all(param.grad is None for _, param in self._params)
        if is_none_left or self._at_hand.was_thrown_away():
            self._take_gradients()

    def _take_gradients(self) -> Accumulation:
        """Return what the gradients at hand weigh, which become averages or are dropped."""
        taken = self._at_hand
        self._at_hand = Accumulation()
        return taken

    def use_unit(self, unit: float) -> None:
        """Divide later gradients by about `unit` where they travel: a power of two, so that no bit
        follows from it.
        """
        self._unit = ldexp(0.5, frexp(unit)[1]) if unit else self._unit

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
        """Read what came in the latest step, if that was not done; on a GPU this waits for the
        first bucket's sum.
        """
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


def require_number(what: str, number: object) -> float:
    """Return `number` as a float; raise `UsageError` if it is none, or lies on a GPU."""
    if isinstance(number, Tensor) and number.numel() == 1 and number.device.type == "cpu":
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, int | float | np.number):
        raise UsageError(
            f"{what} needs a number on the host and got {number!r:.60}: of a tensor on a GPU its"
            " item()"
        )
    try:
        return float(number)
    except (OverflowError, TypeError) as error:  # of an int that is too large, of a complex number
        raise UsageError(f"{what} needs a real number of float64 and got {number!r:.60}") from error


def _require_weight(weight: object) -> float:
    """Return `weight` as a float; raise `UsageError` if it is no weight."""
    found = require_number("weigh()", weight)
    if not 0 <= found <= MOST:
        raise UsageError(
            f"weigh() with {found}: a weight is not negative and at most 2^53, such as the tokens"
            " that a loss is the mean of"
        )
    return found


def _digest(names: tuple[str, ...]) -> int:
    """Return 32 bits of `names`, not 0 if there are any."""
    return zlib.crc32("\0".join(names).encode()) or 1 if names else 0
