# SPDX-License-Identifier: Apache-2.0
"""When a step ends, where ranks exchange after the optimizers' steps, in a loop that says nothing.

Counts alone: no tensor, no model and no world. Used on the thread that trains, and `on_pass` on
that of its backward pass; docs/architecture.md has a drawing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

MOST_PASSES = 20
"""More than the 17 that a `GradScaler` skips on its way from a scale of 2^16 to one below 1."""
NONE = range(0)


class StepClock:
    """Counts a loop's backward passes and its optimizers' steps, and tells which steps must end.

    Step k belongs to pass k. An event returns the steps that end there, in order. The caller
    exchanges after each of them, and calls `end_step`; one that fails before is due again. Others
    only read its attributes.
    """

    def __init__(self, optimizers: Iterable[Hashable]) -> None:
        """Count for `optimizers`, each known by any value."""
        self.step = 0
        """Steps that have ended."""
        self.passes = 0
        """Backward passes outside of `no_sync`, and calls of `average`, so far."""
        self.unused = 0
        """Of them, those since an optimizer stepped; over `MOST_PASSES` is an error of the loop."""
        # by optimizer: how many passes had come when it last stepped
        self._used = dict.fromkeys(optimizers, 0)
        self._left_out: int | None = None  # the pass that no optimizer is to use

    def on_pass(self, *, within_step: bool) -> None:
        """Count a pass; one `within_step` is of an optimizer's closure, which may repeat it."""
        self.passes += 1
        self.unused = 0 if within_step else self.unused + 1

    def on_step_begin(self, optimizer: Hashable) -> range:
        """End the steps that `optimizer` has used already: others may never step."""
        return range(self.step, self._used[optimizer])

    def on_step_end(self, optimizer: Hashable) -> range:
        """End all steps if `optimizer` is the last one that uses them."""
        self._used[optimizer] = self.passes
        self.unused = 0
        return range(self.step, self.passes) if min(self._used.values()) > self.step else NONE

    def on_weights_needed(self) -> range:
        """End all steps: the weights are needed as they are, or no optimizer will step.

        Before a forward pass that trains, in `drain`, `average` and `consolidate`, at the end of
        `join`, and after a pass that is left out.
        """
        return range(self.step, self.passes)

    def on_save(self) -> range:
        """End all steps that no optimizer has used; a checkpoint holds the others as they are."""
        return NONE if self.is_used else range(self.step, self.passes)

    def end_step(self) -> None:
        """Note that the next step has ended."""
        self.step += 1
        if not self._used:
            self.unused = 0

    def leave_out(self, *, running: bool) -> None:
        """Let no optimizer use the pass that comes next, or the one that is `running`."""
        self._left_out = self.passes if running else self.passes + 1

    @property
    def is_left_out(self) -> bool:
        """True if no optimizer is to use the latest pass."""
        return self._left_out == self.passes

    @property
    def is_used(self) -> bool:
        """True if an optimizer has used a step that has not ended."""
        return max(self._used.values(), default=0) > self.step

    def pending(self) -> tuple[int, list[int]]:
        """Return how many passes have no end yet, and how many of them each optimizer has used."""
        used = [max(passes - self.step, 0) for passes in self._used.values()]
        return self.passes - self.step, used

    def restart(self, step: int, passes: int = 0, used: Sequence[int] = ()) -> None:
        """Go on after `step` steps and so many `passes` without an end, as `pending` returned."""
        self.step = step
        self.passes = step + passes
        self.unused = passes
        self._left_out = None
        self._used = dict.fromkeys(self._used, step)
        for optimizer, latest in zip(self._used, used, strict=False):
            self._used[optimizer] += latest
