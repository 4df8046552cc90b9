# SPDX-License-Identifier: Apache-2.0
"""Weights that leave together and come back mixed, and whether others wrote them meanwhile.

What gossip and local SGD have in common; they send and mix. It writes no weights. On the thread
that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from commrt.buckets.changed_model import MODEL_CHANGED, REPLACED
from commrt.buckets.digest import in_memory_order
from commrt.buckets.tensor_kind import TensorKind
from commrt.buckets.tensors import TensorSlot
from commrt.errors import UsageError

MOST_LOOKED_AT = 256  # values of each tensor, evenly spaced
_version = attrgetter("_version")


def _spaced(tensor: Tensor) -> Tensor:
    """Return a view of at most `MOST_LOOKED_AT` elements; of none where memory has gaps or
    overlaps.
    """
    dense = in_memory_order(tensor.detach())
    if not dense.is_contiguous():
        return tensor.detach().new_empty(0)
    return dense.view(-1)[:: max(-(-tensor.numel() // MOST_LOOKED_AT), 1)]


def _differ(now: Tensor, before: Tensor) -> bool:
    """Return True unless both have the same values, where NaN equals NaN."""
    return now.shape != before.shape or not torch.allclose(
        now.to(before.dtype), before, rtol=0, atol=0, equal_nan=True
    )


class WeightPart:
    """Tensors of a model that leave together, and come back mixed. All calls belong to the thread
    that trains.

    While they are relied on, only optimizers that commrt knows, and commrt itself, may write the
    parameters; forward passes may write the buffers. Other writes are found by what autograd
    counts, and on a CPU by the values, some of which are compared: ``.data`` is not counted. On a
    GPU the host would have to wait for values.
    """

    IN_FLIGHT: ClassVar[str]
    """The error about a parameter ``{name}`` that somebody else wrote while it was in flight."""
    WRITTEN: ClassVar[str]
    """The error about a parameter ``{name}`` that was written while nothing was in flight."""
    in_flight: object = None
    """What has left and was not mixed; false if there is nothing. Subclasses and senders set it."""
    is_relied_on = False
    """True if what the weights change by always counts, and not only while they are in flight; a
    subclass's constructor says so.
    """

    def __init__(self, index: int, held: Sequence[TensorSlot], *, watches: bool = True) -> None:
        self.index = index
        self.held = held
        self._watched = [slot for slot in held if watches and not slot.is_buffer]
        self._places = [(slot.place, slot.key) for slot in self._watched]
        self._attached = [place[key] for place, key in self._places]
        self._attached_kinds = [TensorKind.of(slot.tensor()) for slot in self._watched]
        # as `note` found them
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._views: list[Tensor] = []  # of the values that are compared
        self._values: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return what lies in the slots now."""
        return [slot.place.get(slot.key) for slot in self.held]

    def note(self, *, anyway: bool = False) -> None:
        """Take the weights as they are now, if they are relied on: an optimizer or commrt has
        written them.
        """
        if self._watched and (anyway or self.in_flight or self.is_relied_on):
            tensors, self._versions, addresses = self._look()
            if addresses != self._addresses:
                self._addresses = addresses
                self._views = [*map(_spaced, tensors)]
            self._values = torch.cat(self._views)

    def written(self, *, anyway: bool = False) -> str | None:
        """Return the name of a parameter that is relied on and was written since `note`; None if
        there is none.

        While nothing is in flight a parameter that has its values again counts as unchanged.
        """
        if self._values is None or not (anyway or self.in_flight or self.is_relied_on):
            return None
        tensors, versions, addresses = self._look()
        stays = addresses == self._addresses
        is_untouched = versions == self._versions
        if self.in_flight and not (stays and is_untouched):
            now = zip(versions, addresses, strict=True)
            before = zip(self._versions, self._addresses, strict=True)
            return self._name_of([one != other for one, other in zip(now, before, strict=True)])
        if self._values.is_cuda and stays and is_untouched:
            return None
        views = self._views if stays else [*map(_spaced, tensors)]
        if torch.equal(torch.cat(views), self._values):
            return None
        noted = torch.split(self._values, [len(view) for view in self._views])
        return self._name_of(
            [_differ(now, before) for now, before in zip(views, noted, strict=True)]
        )

    def require_unwritten(self, *, anyway: bool = False) -> None:
        """Raise `UsageError` if somebody else has written a parameter; see `written`."""
        if name := self.written(anyway=anyway):
            self.require_attached()
            raise UsageError((self.IN_FLIGHT if self.in_flight else self.WRITTEN).format(name=name))

    def require_attached(self) -> None:
        """Raise `UsageError` if a parameter is not the one that was attached, or of another kind
        now.
        """
        for slot, attached, kind in zip(
            self._watched, self._attached, self._attached_kinds, strict=True
        ):
            if slot.place.get(slot.key) is not attached:
                raise UsageError(REPLACED.format(name=slot.name))
            if (now := TensorKind.of(slot.tensor())) != kind:
                raise UsageError(
                    MODEL_CHANGED.format(change=f"{slot.name} was {kind} and is {now}")
                )

    def _look(self) -> tuple[list[Tensor], list[int], list[int]]:
        """Return the parameters, how often autograd saw each written, and where each lies."""
        try:
            tensors: list[Tensor] = [place[key] for place, key in self._places]  # type: ignore[misc]
            return tensors, [*map(_version, tensors)], [*map(Tensor.data_ptr, tensors)]
        except (KeyError, AttributeError):  # it was deleted, or is None
            self.require_attached()
            raise

    def _name_of(self, changed: Sequence[bool]) -> str | None:
        return next(
            (slot.name for slot, is_so in zip(self._watched, changed, strict=True) if is_so), None
        )
