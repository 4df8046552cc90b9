# SPDX-License-Identifier: Apache-2.0
"""The parameters of an attached model, and whether they are still the ones that were attached.

It only looks, and raises where the model has changed. `names` may run on any thread that steps an
optimizer, of this model or of another; the rest on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from commrt.buckets.changed_model import MODEL_CHANGED
from commrt.errors import UsageError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class ParameterList:
    """The parameters of a model as they are now; modules without any may come and go later.

    A check costs 0.1 us per module and parameter, and a walk through all once one has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = _names(model)
        self._frozen = [
            (name, param) for name, param in model.named_parameters() if not param.requires_grad
        ]
        modules = model.named_modules()
        self._tables = [
            each for each in modules if isinstance(each[1], EMBEDDINGS) and each[1].max_norm is None
        ]
        # what holds the model's modules and parameters, and what it held in the latest walk
        self._dicts: list[dict[str, Any]] = []
        self._known: list[Any] = []
        self._remember()

    def require_unchanged(self) -> None:
        """Raise `UsageError` if a parameter came, went, was unfrozen, or is written in forward."""
        if not self._is_as_before():
            _refuse(self._changed_parameter())
            self._remember()
        for name, param in self._frozen:
            if param.requires_grad:
                _refuse(f"{name} was frozen and is not any more")
        for name, table in self._tables:
            if table.max_norm is not None:
                _refuse(f"max_norm of {name or 'it'} was set")

    def names(self) -> Mapping[int, str]:
        """Return the names of the model's present parameters by their ids."""
        return self._names if self._is_as_before() else _names(self._model)

    def _is_as_before(self) -> bool:
        """Return True if all modules hold the same objects as in the latest walk."""
        # each dict is copied in one call: another thread may own the model, and change it now
        now = [*chain.from_iterable(map(tuple, map(dict.values, self._dicts)))]
        return len(now) == len(self._known) and all(map(is_, now, self._known))

    def _remember(self) -> None:
        """Walk through the model, and take what it holds now for unchanged."""
        modules = list(self._model.modules())
        # These dicts hold the contents of modules; public access would walk through all again.
        self._dicts = [
            *(module._modules for module in modules),  # noqa: SLF001
            *(module._parameters for module in modules),  # noqa: SLF001
        ]
        self._known = [*chain.from_iterable(map(dict.values, self._dicts))]

    def _changed_parameter(self) -> str | None:
        now = _names(self._model)
        gone = (
            f"{name} was replaced or removed"
            for param, name in self._names.items()
            if param not in now
        )
        added = (f"{name} was added" for param, name in now.items() if param not in self._names)
        return next(chain(gone, added), None)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def _refuse(change: str | None) -> None:
    if change is not None:
        raise UsageError(MODEL_CHANGED.format(change=change))
