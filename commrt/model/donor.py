# SPDX-License-Identifier: Apache-2.0
"""A rank's state, as others may copy it: whole, of one version, and without stopping the rank.

From the begin of a forward pass to the optimizer's step nothing of it changes but buffers, so it may be copied while
the rank computes. Only the optimizer's step waits, until who copies has done so. A loop may change weights for a while,
to evaluate averaged ones for instance: then nobody gets them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from pickle import UnpicklingError
from threading import Condition
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.membership.store_client import parse, parse_int, require
from commrt.model.imprint import Imprint
from commrt.model.state import Stateful, dump, flatten, load, restore, unread_buffers

__all__ = ["Donor", "Edition", "Gift", "Has", "Parts", "packed", "unpacked"]

_log = logging.getLogger("commrt")
PUT_BACK = (
    "commrt: this rank was late and was given the weights of others in its forward pass; they were changed again "
    "before the optimizer's step. If its loop put back weights that it had kept, these are old ones: replicas differ "
    "from here on, and a loop that exchanges weights around each pass cannot be trained with backup workers"
)


class Edition(NamedTuple):
    """Where a rank is, besides its tensors."""

    version: int
    """How many updates it has applied."""
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
    rest: Tensor
    """Parameters that are frozen, if a loop has changed them: a teacher that follows, for instance."""
    buffers: Tensor
    states: Tensor
    """As bytes, all of them."""


class Has(Enum):
    """Of a state that was asked for."""

    IT = b"1"
    NOTHING = b""
    """But perhaps later."""
    OTHERS = b"0"
    """It had it, but its weights were changed outside of a step."""


class Parts(NamedTuple):
    """The parameters of a model."""

    learning: Sequence[nn.Parameter]
    """Whose gradients are averaged."""
    rest: Sequence[nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module, averaged: Sequence[Tensor]) -> Parts:
        """Those of `model`, in its order."""
        known = {*map(id, averaged)}
        params = [*model.parameters()]
        return cls([one for one in params if id(one) in known], [one for one in params if id(one) not in known])


class Donor:
    """Of one model; its own thread opens and shuts it, others copy while it is open."""

    def __init__(self, parts: Parts, owners: Callable[[], Sequence[Stateful]]) -> None:
        self._parts, self._owners = parts, owners
        self._imprint, self._imprint_of_rest = Imprint(parts.learning), Imprint(parts.rest)
        self._is_taken = False  # in this step's forward pass, from another rank
        self._settled_in: int | None = None  # the version of which it was seen what parameters should be
        self._is_passed = False  # its first forward pass has ended
        self._loop_changes_them = False  # between an optimizer's step and a forward pass, the last time it came there
        self._changed = Condition()
        self._edition: Edition | None = None
        self._buffers: Tensor | None = None
        self._mark: torch.cuda.Event | None = None
        self._is_whole = True
        self._readers = 0

    def settle(self, *, with_rest: bool = False) -> None:
        """Parameters are what they should be: an optimizer has stepped, or all agree on them."""
        self._settle_for(None)
        if with_rest:
            self._imprint_of_rest.take()

    def is_new(self, version: int) -> bool:
        """True before the first forward pass of `version`."""
        return self._settled_in != version

    def become(self, gift: Gift, model: nn.Module, *, in_pass: bool) -> None:
        """What `gift` says; its bytes fit a `model` like the donor's. Between steps they are looked at again."""
        if in_pass:
            self._look()
        _install(gift, model, self._parts, self._owners())
        self._is_taken = in_pass
        self._settle_for(gift.edition.version if in_pass else None)

    def weights(self) -> Tensor:
        """A copy of all, as bytes."""
        return flatten([*self._parts.learning, *self._parts.rest])

    def go_back_to(self, weights: Tensor, version: int, *, in_pass: bool) -> None:
        """To those of `version`, as `weights` gave them."""
        if in_pass:
            self._look()
        restore(weights, [*self._parts.learning, *self._parts.rest])
        self._settle_for(version)

    def _settle_for(self, version: int | None) -> None:
        self._imprint.take()
        self._settled_in, self._is_passed = version, False

    def _look(self) -> None:
        self._loop_changes_them = not self._imprint.fits

    def settle_again(self, *_: object) -> None:
        """A forward pass has ended: what the first of a version did to parameters belongs to that."""
        begun = self._edition is not None and self._settled_in == self._edition.version and not self._is_passed
        if begun and torch.is_grad_enabled():
            self._imprint.take()
            self._is_passed = True

    @property
    def is_intact(self) -> bool:
        """Between steps: nobody has changed parameters, but as it is done after every step."""
        return self._loop_changes_them or self._imprint.fits

    def open(self, edition: Edition, buffers: Tensor, *, is_whole: bool = True) -> None:
        """Parameters and states are now of `edition`; `buffers`, as bytes, belong to it. A step is due: not `is_whole`.

        In a pass they are what they should be, with all that a loop does after its optimizer's step; but of a version
        that is there already they are not looked at again: a loop may move them between two passes of one step.
        """
        if edition.in_pass and self._settled_in != edition.version:
            self._look()
            self._settle_for(edition.version)
        device = self._parts.learning[0].device
        mark = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._changed:
            self._edition, self._buffers, self._mark, self._is_whole = edition, buffers, mark, is_whole
            self._changed.notify_all()

    def shut(self) -> None:
        """Parameters are about to change; waits for who copies them."""
        if self._is_taken and not self._imprint.fits:
            _log.warning(PUT_BACK)
        self._is_taken = False
        with self._changed:
            self._edition = None
            while self._readers:
                self._changed.wait()

    def give(self, version: int, limit_s: float) -> bytes | None:
        """A copy of `version` or a later one, as `packed`; None if it is not there in time, or was changed."""
        edition = self._begin(version, monotonic() + limit_s)
        if edition is None:
            return None
        try:
            writes, was_whole = self._imprint.writes, self._has_whole(edition)
            gift = self._copy(edition)
            stayed = was_whole and self._has_whole(edition) and self._imprint.writes == writes
        finally:
            self._end()
        return packed(gift) if stayed else None

    def has(self, version: int, limit_s: float) -> Has:
        """Whether `give` would begin at once; waits for that."""
        edition = self._begin(version, monotonic() + limit_s)
        if edition is None:
            return Has.NOTHING
        try:
            return Has.IT if self._has_whole(edition) else Has.NOTHING if edition.in_pass else Has.OTHERS
        finally:
            self._end()

    def _has_whole(self, edition: Edition) -> bool:
        if self._mark is not None:
            self._mark.synchronize()
        return self._is_whole and (self._imprint.fits if edition.in_pass else self.is_intact)

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
        buffers = torch.empty(0, dtype=torch.uint8) if self._buffers is None else self._buffers
        params = _bytes(self._parts.learning)
        rest = _bytes([] if self._imprint_of_rest.fits else self._parts.rest)
        return Gift(edition, params, rest, buffers.cpu(), dump(self._owners()))


def _bytes(params: Sequence[Tensor]) -> Tensor:
    """In the host's memory, piece by piece."""
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(flatten([param]).cpu() for param in params)])


def _install(gift: Gift, model: nn.Module, parts: Parts, owners: Sequence[Stateful]) -> None:
    restore(gift.params.to(parts.learning[0].device), parts.learning)
    if gift.rest.numel():
        restore(gift.rest.to(parts.rest[0].device), parts.rest)
    if buffers := [*model.buffers()]:
        restore(gift.buffers.to(buffers[0].device), buffers, unread_buffers(model))
    load(gift.states, owners)


def packed(gift: Gift) -> bytes:
    """As bytes."""
    file = io.BytesIO()
    torch.save((list(gift.edition), *gift[1:]), file)
    return file.getvalue()


def unpacked(said: bytes) -> Gift:
    """What was `packed`; never runs what came with it. Raises `DisagreementError` for anything else."""
    return parse("state of another rank", said, _gift)


def _gift(said: bytes) -> Gift:
    try:
        edition, *tensors = torch.load(io.BytesIO(said), map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError, AssertionError) as error:  # what torch says of other bytes
        raise ValueError(str(error)) from error
    require(len(edition) == len(Edition._fields) and len(tensors) == len(Gift._fields) - 1)
    require(all(isinstance(tensor, Tensor) and tensor.dtype == torch.uint8 for tensor in tensors))
    return Gift(_checked(Edition(*edition)), *tensors)


def _checked(edition: Edition) -> Edition:
    *numbers, order, era, in_pass = edition
    for each in (*numbers, era, *(order or [])):
        parse_int(each)
    require(isinstance(order, list | None) and isinstance(in_pass, bool))
    return edition
