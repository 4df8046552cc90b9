# SPDX-License-Identifier: Apache-2.0
"""Second copies of weights that an optimizer keeps, such as fp32 masters of bf16 parameters.

Such an optimizer writes its copies over the parameters in each step. So whatever commrt writes to a
parameter must reach its copies too, or the next step undoes it. Writes those copies and nothing
else; sends nothing. On the thread that trains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from commrt.training.copy_search import Copy, copies_in


class WeightCopies:
    """The copies found in `optimizers`: in state, attributes, lists, dicts and flat tensors.

    Each rank looks by itself, by the values that it has. `attach` compares how many each has found.
    Later no rank asks the others: they find the same if their optimizers keep copies alike. Else
    they send different states, which ends in an error.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._numbers = {optimizer: number for number, optimizer in enumerate(optimizers)}
        self._steps = Counter[Optimizer]()
        self.found: dict[object, Copy] = {}
        """By the place where each lies in an optimizer; others read it."""

    def owners(self) -> list[WeightCopies]:
        """Return what is sent along with the optimizers' state: nothing if there are no copies."""
        return [self] if self.found else []

    def find(self) -> None:
        """Look for more copies: tensors that hold all values of the parameters they stand for."""
        self._drop_others()
        for optimizer in self._numbers:
            self._find_in(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Look for copies after steps 1, 2, 4, 8 and so on, as any step may make them."""
        self._steps[optimizer] += 1
        if self._steps[optimizer].bit_count() == 1:
            self._find_in(optimizer)

    def _drop_others(self) -> None:
        """Forget what only began as a copy, as an average of weights, or what they are drawn to."""
        self.found = {place: copy for place, copy in self.found.items() if copy.stands_for_param()}

    def _find_in(self, optimizer: Optimizer) -> None:
        if optimizer in self._numbers:
            for copy in copies_in(optimizer, self._numbers[optimizer]):
                keys = (id(key) if isinstance(key, Tensor) else key for _, key in copy.path)
                self.found[optimizer, *keys, copy.begin] = copy

    def before(self, params: Iterable[Tensor | None]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each copy of `params`, its parameter, and what that is now.

        It forgets what is no copy any more, for which a GPU waits.
        """
        self._drop_others()
        wanted = {id(param) for param in params}
        pairs = (
            (each.tensor(), each.param) for each in self.found.values() if id(each.param) in wanted
        )
        return [(copy, param, param.detach().clone()) for copy, param in pairs if copy is not None]

    @torch.no_grad()
    def follow(self, before: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Move copies by what their parameters have moved by since `before`."""
        for copy, param, old in before:
            copy.add_(param.to(copy) - old.to(copy))

    @torch.no_grad()
    def settle(self) -> None:
        """Set copies to what their parameters are."""
        for each in self.found.values():
            if (copy := each.tensor()) is not None:
                copy.copy_(each.param)

    def state_dict(self) -> dict[str, Any]:
        """Return the copies by name, those that share one in the order in which they were found."""
        named = defaultdict[str, list[Tensor]](list)
        for each in self.found.values():
            if (copy := each.tensor()) is not None:
                named[each.name].append(copy.clone())
        return dict(named)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take the copies of another rank."""
        left = {name: iter(values) for name, values in state.items()}
        for each in self.found.values():
            if each.name in left and (copy := each.tensor()) is not None:
                copy.copy_(next(left[each.name], copy))
