# SPDX-License-Identifier: Apache-2.0
"""A learning rate that follows the batches of `batch_size` through a training.

Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018. The noise
of a step is about rate over batch, so a growing batch can replace a decay of the learning rate.

It writes the rates in the optimizer's groups. On the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from torch.optim import Optimizer

from commrt.data.batch_size import BatchSizeControl, epochs_in, is_count
from commrt.errors import UsageError
from commrt.store.parsing import MALFORMED, parse_int

Rule = Literal["keep", "sqrt", "linear"]
RULES: Mapping[str, float] = {"keep": 0.0, "sqrt": 0.5, "linear": 1.0}
"""The rate grows by the batch's growth to this power."""


class Rate:
    """A learning rate that rises for some epochs, then falls to 0: call `step` after each update.

    It depends on the fraction of the training that is done, and sets the rate itself: use none of
    torch's schedulers beside it. `rule` says what growing batches do to it: with ``keep`` their
    growth replaces a decay, with ``linear`` and ``sqrt`` the rate grows too. A step of more ranks
    is a larger batch: tell `step` of how many. With backup workers name it in
    ``attach(also=[...])``, so that a late rank has the rate of the others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: BatchSizeControl,
        epochs: float,
        *,
        warmup_epochs: float = 5.0,
        power: float = 2.0,
        rule: Rule = "keep",
    ) -> None:
        if rule not in RULES:
            raise UsageError(f"rule={rule!r}: choose one of {', '.join(RULES)}")
        if not 0 <= warmup_epochs < epochs < inf:
            raise UsageError(
                f"{warmup_epochs:g} of {epochs:g} epochs to warm up: give 0 or more, and fewer than"
                " there are"
            )
        self._optimizer = optimizer
        self._control = control
        self._epochs = epochs
        self._warmup = warmup_epochs
        self._power = power
        self._rule = RULES[rule]
        self._highest: list[float] = [group["lr"] for group in optimizer.param_groups]
        self._updates = 0
        # of the first update for which that was said, and of the latest
        self._ranks: tuple[int, int] | None = None
        self._set()

    def step(self, ranks: int | None = None) -> None:
        """Count an update.

        Its gradients are those of `ranks`: ``len(replica.last.members)``, by default as many as
        before.
        """
        self._updates += 1
        if ranks:  # a late rank of backup workers knows none
            self._ranks = (ranks if self._ranks is None else self._ranks[0], ranks)
        self._set()

    def _set(self) -> None:
        now = self._control.epochs_after(self._updates)
        after = self._control.epochs_after(self._updates + 1)
        first, ranks = self._ranks or (1, 1)
        growth = self._control.batch_in(int(now)) * ranks / (self._control.batch_in(0) * first)
        begun = after / self._warmup if self._warmup else 1.0
        rest = max(self._epochs - now, 0.0) / (self._epochs - self._warmup)
        factor = float(growth**self._rule * min(begun, 1.0) * min(rest, 1.0) ** self._power)
        for group, highest in zip(self._optimizer.param_groups, self._highest, strict=True):
            group["lr"] = highest * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the highest rates, how much of the training is done, and of how many ranks."""
        epochs = self._control.epochs_after(self._updates)
        return {"highest": self._highest, "epochs": epochs, "ranks": self._ranks and [*self._ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; with other ranks, as far in the training after other updates."""
        epochs = epochs_in(state, "a Rate")
        highest = state.get("highest")
        rates = highest if isinstance(highest, list | tuple) else []
        try:
            told = state.get("ranks")
            first, latest = (
                (1, 1) if told is None else (parse_int(count, least=1) for count in told)
            )
        except MALFORMED:
            rates = []
        if len(rates) != len(self._highest) or not all(map(is_count, rates)):
            raise UsageError(
                f"a state of other rates: {state!r:.200}; pass what state_dict() of this"
                " optimizer's returned"
            )
        self._updates = self._control.updates_after(epochs)
        self._highest = [*rates]
        self._ranks = told and (first, latest)
        self._set()
