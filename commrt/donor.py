# SPDX-License-Identifier: Apache-2.0
"""A rank's state, as others may copy it: whole, of one version, and without stopping the rank.

From the begin of a forward pass to the optimizer's step nothing of it changes but buffers, so it may be copied while
the rank computes. Only the optimizer's step waits, until who copies has done so.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from threading import Condition
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.state import Stateful, dump, flatten, load, restore, unread_buffers

__all__ = ["Donor", "Edition", "Gift", "install", "packed", "unpacked"]


class Edition(NamedTuple):
    """Where a rank is, besides its tensors."""

    version: int
    """How many updates it has applied."""
    generation: int
    """Through which connections."""
    optimizer_steps: int
    order: list[int] | None
    """In which gradients became ready, once that is known."""
    era: int
    """How often a checkpoint was loaded, and one more."""
    in_pass: bool
    """It is in a forward pass or a backward pass, not before its loop goes on."""


class Gift(NamedTuple):
    """What a rank that was late becomes."""

    edition: Edition
    params: Tensor
    buffers: Tensor
    states: Tensor
    """As bytes, all three."""


class Donor:
    """Of one model; its own thread opens and shuts it, others copy while it is open."""

    def __init__(self, model: nn.Module, owners: Callable[[], Sequence[Stateful]]) -> None:
        self._model, self._owners = model, owners
        self._changed = Condition()
        self._edition: Edition | None = None
        self._buffers: Tensor | None = None
        self._mark: torch.cuda.Event | None = None
        self._readers = 0

    def open(self, edition: Edition, buffers: Tensor) -> None:
        """Parameters and states are now of `edition`; `buffers`, as bytes, belong to it."""
        device = next(self._model.parameters()).device
        mark = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._changed:
            self._edition, self._buffers, self._mark = edition, buffers, mark
            self._changed.notify_all()

    def shut(self) -> None:
        """Parameters are about to change; waits for who copies them."""
        with self._changed:
            self._edition = None
            while self._readers:
                self._changed.wait()

    def give(self, version: int, limit_s: float) -> bytes | None:
        """A copy of `version` or a later one, as `packed`; None if it is not there in time."""
        edition = self._begin(version, monotonic() + limit_s)
        if edition is None:
            return None
        try:
            gift = self._copy(edition)
        finally:
            self._end()
        return packed(gift)

    def has(self, version: int, limit_s: float) -> bool:
        """True if `give` would begin at once; waits for that."""
        edition = self._begin(version, monotonic() + limit_s)
        if edition is not None:
            self._end()
        return edition is not None

    def _end(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def _begin(self, version: int, end_s: float) -> Edition | None:
        with self._changed:
            while self._edition is None or self._edition.version < version:
                if not self._changed.wait(end_s - monotonic()):
                    return None
            self._readers += 1
            return self._edition

    def _copy(self, edition: Edition) -> Gift:
        if self._mark is not None:
            self._mark.synchronize()
        buffers = torch.empty(0, dtype=torch.uint8) if self._buffers is None else self._buffers
        params = torch.cat([flatten([param]).cpu() for param in _learning(self._model)])
        return Gift(edition, params, buffers.cpu(), dump(self._owners()))


def install(gift: Gift, model: nn.Module, owners: Sequence[Stateful]) -> None:
    """Become what `gift` says; its bytes fit a model like the donor's."""
    restore(gift.params.to(next(model.parameters()).device), _learning(model))
    if buffers := [*model.buffers()]:
        restore(gift.buffers.to(buffers[0].device), buffers, unread_buffers(model))
    load(gift.states, owners)


def _learning(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that change."""
    return [param for param in model.parameters() if param.requires_grad]


def packed(gift: Gift) -> bytes:
    """As bytes."""
    file = io.BytesIO()
    torch.save((list(gift.edition), *gift[1:]), file)
    return file.getvalue()


def unpacked(said: bytes) -> Gift:
    """What was `packed`; never runs what came with it."""
    edition, params, buffers, states = torch.load(io.BytesIO(said), map_location="cpu", weights_only=True)
    return Gift(Edition(*edition), params, buffers, states)
