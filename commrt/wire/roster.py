# SPDX-License-Identifier: Apache-2.0
"""Is the model still made of what was attached? A parameter that came later is averaged by nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from torch import nn

__all__ = ["Roster"]


class Roster:
    """The parameters of a model, as they were when this was made; modules without any may come and go.

    Cost of looking: 0.1 us for each module and parameter, and a walk through the model each time a module has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params = list(model.named_parameters())
        self._frozen = [(name, param) for name, param in self._params if not param.requires_grad]
        self._remember()

    def difference(self) -> str | None:
        """The first thing that has changed, in words."""
        if not self._is_as_remembered():
            if change := self._changed_parameter():
                return change
            self._remember()
        for name, param in self._frozen:
            if param.requires_grad:
                return f"{name} was frozen and is not any more"
        return None

    def _remember(self) -> None:
        self._lists = [(part, len(part)) for part in _lists(self._model)]
        self._entries = [(part, key, thing) for part, _ in self._lists for key, thing in part.items()]

    def _is_as_remembered(self) -> bool:
        for part, key, thing in self._entries:
            if part.get(key) is not thing:
                return False
        return all(len(part) == count for part, count in self._lists)

    def _changed_parameter(self) -> str | None:
        now = list(self._model.named_parameters())
        there, known = {id(param) for _, param in now}, {id(param) for _, param in self._params}
        gone = (f"{name} was replaced or removed" for name, param in self._params if id(param) not in there)
        added = (f"{name} was added" for name, param in now if id(param) not in known)
        return next(chain(gone, added), None)


def _lists(model: nn.Module) -> Iterator[Mapping[str, object]]:
    """What each module keeps its children and its parameters in; a view of it, not a copy."""
    for module in model.modules():
        yield module._modules  # noqa: SLF001  # public access goes through all modules again
        yield module._parameters  # noqa: SLF001
