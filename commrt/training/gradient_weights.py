# SPDX-License-Identifier: Apache-2.0
"""What gradients weigh, from their backward passes until they leave or are dropped.

`GradientWeights.weigh` writes on the user's loss: an attribute, and a hook that multiplies its
gradient in the backward pass. All else only looks at ``param.grad``, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import frexp, ldexp

from torch import Tensor

from commrt.buckets.tensors import Named
from commrt.errors import UsageError
from commrt.runtime.untraced import untraced
from commrt.training.backward_pass import NO_PASS, at_end_of_backward, current_pass
from commrt.training.host_number import require_number

ATTRIBUTE = "_commrt_weight"
"""Where a loss that weighs holds its weight."""
MOST = 2.0**53
"""No weight is larger."""


@untraced
class Accumulation:
    """What the gradients at hand weigh: the sum of backward passes that were not averaged yet.

    `GradientWeights` alone writes it.
    """

    def __init__(self) -> None:
        self.passes = 0
        """Backward passes that were counted."""
        self.weight: float | None = None
        """None if these gradients are not weighed."""
        self.reference = 0.0
        """Divides gradients to keep them as large as a mean: about the first weight; 0 before."""
        # each parameter, and which gradient it had, written how often
        self._grads: list[tuple[Tensor, int, int]] = []

    def note(self, params: Sequence[Named]) -> None:
        """Remember what the latest pass has left in the gradients of `params`."""
        self._grads = [
            (param, *_state(param.grad)) for _, param in params if param.grad is not None
        ]

    def was_thrown_away(self) -> bool:
        """Return True if a gradient was removed or replaced since `note`, or some are zeros now.

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
class GradientWeights:
    """What the gradients at hand weigh.

    In a backward pass, in this order:

    1. `_begin` for each loss that weighs, by its hook, before a gradient is counted.
    2. `count_pass`, by replicas in hooks of gradients; it may be left out while `is_idle`.
    3. `leave`, when gradients leave or the rank steps by them alone. Not in passes of `no_sync`,
       which add up.
    4. `_note`, at the end of a pass with a 1; it acts on what has not left then.

    Between passes: `weigh`; `forget_thrown_away` and ``leave(None)`` in a step without a pass;
    `take` where gradients are dropped. `leave` and `take` begin a new accumulation. Hooks run on
    the thread of the backward pass, while the one that trains waits in ``backward()``; so no two
    threads are in here at once. Written by others: `is_idle`, by `Riding` in each step.
    """

    def __init__(self, params: Sequence[Named]) -> None:
        self._params = params
        self._at_hand = Accumulation()
        self._begun = NO_PASS  # the latest pass of losses that weigh
        self._coming = 0.0  # what these losses weigh so far
        self._is_refused = False  # that pass adds to averages, which `count_pass` refuses
        self._counted = NO_PASS  # the latest pass that was counted
        self.unit = 1.0
        """By which gradients are divided where they travel, a power of two; see `use_unit`."""
        self.is_idle = True
        """True if no pass was weighed or counted since a step of which nothing rode.

        `Riding` sets it when a step leaves: to True if nothing rides, else to False.
        """

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
        if number == self._counted:
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
        """Note that backward pass `number` adds to the gradients; one of `autograd.grad` does not.

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
            own, others = ("is", "are not") if weighs else ("is not", "are")
            raise UsageError(
                f"this backward pass {own} weighed by replica.weigh(), and those accumulated before"
                f" it ({at_hand.passes}) {others}: weigh the loss of every pass or of none, and"
                " call zero_grad() first where earlier gradients are not to be used"
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
        return 1.0 if at_hand.weight is None else (at_hand.reference or 1.0) / self.unit

    @property
    def has_passes(self) -> bool:
        """True if gradients of backward passes are at hand that were not averaged."""
        return self._at_hand.passes > 0

    def forget_thrown_away(self) -> None:
        """Forget what gradients weigh that were thrown away."""
        is_none_left = all(param.grad is None for _, param in self._params)
        if is_none_left or self._at_hand.was_thrown_away():
            self.take()

    def leave(self, number: int | None) -> Accumulation:
        """Return what the gradients of backward pass `number` weigh, and of those in `no_sync`
        before it.

        They leave now, or this rank steps by them alone. None stands for those at hand in a step
        without a pass. Losses of pass `number` that are yet to come may not weigh.
        """
        if number is not None and number != self._counted:
            self.count_pass(number)
        return self.take()

    def take(self) -> Accumulation:
        """Return what the gradients at hand weigh, which become averages or are dropped."""
        taken = self._at_hand
        self._at_hand = Accumulation()
        return taken

    def use_unit(self, unit: float) -> None:
        """Divide later gradients by about `unit` on the wire: a power of two, so no bit changes.

        All ranks call it with the same `unit`, between steps.
        """
        self.unit = ldexp(0.5, frexp(unit)[1]) if unit else self.unit


def _require_weight(weight: object) -> float:
    """Return `weight` as a float; raise `UsageError` if it is no weight."""
    found = require_number("weigh()", weight)
    if not 0 <= found <= MOST:
        raise UsageError(
            f"weigh() with {found}: a weight is not negative and at most 2^53, such as the tokens"
            " that a loss is the mean of"
        )
    return found
