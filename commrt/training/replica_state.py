# SPDX-License-Identifier: Apache-2.0
"""Copy a rank's whole state while it trains: weights, buffers and optimizer states, all of one version.

Between the begin of a forward pass and the optimizer's step only buffers change. So another rank may copy the state
while this one computes; only the optimizer's step waits until the copy is done. A training loop may also put other
weights in for a while, to evaluate averaged ones for instance. A fingerprint of the weights finds that, and then no
rank gets them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.membership.store_client import parse, parse_int, require
from commrt.training.model_state import Stateful, dump, flatten, load, restore, unread_buffers

__all__ = ["CHANGED", "Fingerprint", "ReplicaState", "Snapshot", "StateTransfer", "pack", "unpack"]

_log = logging.getLogger("commrt")
OLD_WEIGHTS = (
    "commrt: this rank was late and took the weights of another rank in its forward pass; then they were changed "
    "before the optimizer's step. If your loop put back weights that it had kept, those are old, and replicas differ "
    "from here on. Loops that exchange weights around each pass do not work with backup workers"
)
READY, CHANGED = b"1", b"0"
"""Answers to the question for a state: it can be copied now; the loop has changed its weights outside of a step."""
FINGERPRINT_TENSORS = 4096
"""A fingerprint looks at so many tensors, the largest; each takes 4 us on a CPU."""


class Snapshot(NamedTuple):
    """Where a rank stands in training, besides its tensors."""

    version: int
    """The number of updates that it has applied."""
    optimizer_steps: int
    order: list[int] | None
    """The places of the parameters in the order in which gradients become ready, once that is known."""
    session: int
    """One more than the number of checkpoints loaded since `attach`."""
    in_pass: bool
    """The rank is in a forward or backward pass; its loop has stepped all schedulers of this version."""


class StateTransfer(NamedTuple):
    """The state that a late rank takes over, as bytes."""

    snapshot: Snapshot
    params: Tensor
    untrained: Tensor
    """Frozen parameters, if the loop has changed them, as it does with a teacher that follows; else empty."""
    buffers: Tensor
    states: Tensor


class Fingerprint:
    """Remember the norms of `params`, to find out later whether they have changed.

    >>> weight = torch.zeros(3)
    >>> fingerprint = Fingerprint([weight])
    >>> weight.data += 1
    >>> fingerprint.fits
    False
    >>> weight.data -= 1
    >>> fingerprint.fits
    True
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        largest = sorted(params, key=Tensor.numel)[-FINGERPRINT_TENSORS:]
        self._by_dtype = [[each for each in largest if each.dtype == dtype] for dtype in {p.dtype for p in largest}]
        self.take()

    def take(self) -> None:
        """Remember the parameters as they are now; reads all of them once."""
        self._norms = self._current()

    @property
    def fits(self) -> bool:
        """True if the norms are those that were remembered; waits for the GPU."""
        return torch.equal(self._current(), self._norms)

    @property
    def writes(self) -> int:
        """How often the parameters were written to, as autograd counts; it does not see ``param.data``."""
        return sum(param._version for param in self._params)  # noqa: SLF001

    def _current(self) -> Tensor:
        with torch.no_grad():  # as bytes, since NaN is not equal to itself
            parts = [_norms(params).view(torch.uint8) for params in self._by_dtype]
            return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _norms(params: list[Tensor]) -> Tensor:
    wide = torch.float32 if params[0].itemsize < torch.float32.itemsize else None  # 16 bits would round too much away
    if wide is None or params[0].is_cuda:
        return torch.stack(torch._foreach_norm(params, 2, wide))  # noqa: SLF001  # all at once
    norms = torch.empty(len(params), dtype=wide, device="cpu")  # one by one, since a CPU makes a wider copy first
    for norm, param in zip(norms, params, strict=True):
        norm.copy_(torch.linalg.vector_norm(param, dtype=wide))
    return norms


class ReplicaState:
    """The state of one rank: other ranks copy it while it is open, and it can become that of another rank.

    `owners` are what has state besides the model, such as optimizers and schedulers. The training thread opens and
    shuts; `has` and `give` answer other ranks, on threads of their own.
    """

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter], owners: Sequence[Stateful]) -> None:
        known = {*map(id, trained)}
        self._model, self._owners = model, owners
        self._trained = [param for param in model.parameters() if id(param) in known]
        self._untrained = [param for param in model.parameters() if id(param) not in known]
        self._fingerprint, self._untrained_fingerprint = Fingerprint(self._trained), Fingerprint(self._untrained)
        self._settled_in: int | None = None  # the version in whose forward pass the fingerprint was taken
        self._first_pass_ended = False  # of that version
        self._loop_changes_them = False  # between the latest optimizer step and the forward pass after it
        self._was_installed = False  # in this step's forward pass
        self._changed = Condition()
        self._snapshot: Snapshot | None = None  # None while no rank may copy
        self._is_whole = True
        self._event: torch.cuda.Event | None = None
        self._readers = 0
        self._buffers = self._open_buffers = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._reload: Tensor | None = None
        self._kept_states: Tensor | None = None
        self._kept_weights: Tensor | None = None
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Take the buffers as they are now for those of this version: a forward pass changes them."""
        if any(True for _ in self._model.buffers()):
            self._buffers = flatten([*self._model.buffers()])

    def settle(self, *, with_untrained: bool = False) -> None:
        """Take the weights as they are now for right: an optimizer has stepped, or all ranks agree on them."""
        self._settle_for(None)
        if with_untrained:
            self._untrained_fingerprint.take()

    def _settle_for(self, version: int | None) -> None:
        self._fingerprint.take()
        self._settled_in, self._first_pass_ended = version, False

    def _look(self) -> None:
        self._loop_changes_them = not self._fingerprint.fits

    def after_forward(self, *_: object) -> None:
        """Take what the first forward pass of a version did to the weights as a part of them; a hook of the model."""
        is_first = self._snapshot is not None and self._settled_in == self._snapshot.version
        if is_first and not self._first_pass_ended and torch.is_grad_enabled():
            self._fingerprint.take()
            self._first_pass_ended = True

    @property
    def is_intact(self) -> bool:
        """True if the loop has not changed the weights since the optimizer's step, or does so after every step."""
        return self._loop_changes_them or self._fingerprint.fits

    def open(self, snapshot: Snapshot, *, is_whole: bool = True) -> None:
        """Let other ranks copy this state, which is that of `snapshot`; it is not `is_whole` while a step is due.

        Weights in the first forward pass of a version are taken for right, with all that the loop does to them after
        the optimizer's step. In later passes of that version they are not: a loop may move them between two passes.
        """
        if snapshot.in_pass and self._settled_in != snapshot.version:
            self.keep_buffers()
            self._look()
            self._settle_for(snapshot.version)
        device = self._trained[0].device
        with self._changed:
            self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            self._snapshot, self._is_whole, self._open_buffers = snapshot, is_whole, self._buffers
            self._changed.notify_all()

    def shut(self) -> None:
        """Wait for all copies, and allow no more: the weights are about to change."""
        if self._was_installed and not self._fingerprint.fits:
            _log.warning(OLD_WEIGHTS)
        self._was_installed = False
        with self._changed:
            self._snapshot = None
            self._changed.wait_for(lambda: not self._readers)

    def has(self, version: int, limit_s: float) -> bytes | None:
        """Return `READY` once `version` or a later one can be copied, `CHANGED`, or None if neither is so in time."""
        with self._held_open(version, limit_s) as snapshot:
            if snapshot is None:
                return None
            return READY if self._can_copy(snapshot) else None if snapshot.in_pass else CHANGED

    def give(self, version: int, limit_s: float) -> bytes | None:
        """Return a packed copy of `version` or a later one; None if there is none in time, or it was changed."""
        with self._held_open(version, limit_s) as snapshot:
            if snapshot is None:
                return None
            writes, could = self._fingerprint.writes, self._can_copy(snapshot)
            transfer = self._copy(snapshot)
            is_whole = could and self._can_copy(snapshot) and self._fingerprint.writes == writes
        return pack(transfer) if is_whole else None

    @contextmanager
    def _held_open(self, version: int, limit_s: float) -> Iterator[Snapshot | None]:
        """Let `shut` wait for the body; yields None if `version` or a later one is not open in time."""
        with self._changed:
            is_open = self._changed.wait_for(lambda: self._is_open_for(version), limit_s)
            snapshot = self._snapshot if is_open else None
            self._readers += is_open
        try:
            yield snapshot
        finally:
            with self._changed:
                self._readers -= is_open
                self._changed.notify_all()

    def _is_open_for(self, version: int) -> bool:
        return self._snapshot is not None and self._snapshot.version >= version

    def _can_copy(self, snapshot: Snapshot) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return self._is_whole and (self._fingerprint.fits if snapshot.in_pass else self.is_intact)

    def _copy(self, snapshot: Snapshot) -> StateTransfer:
        untrained = [] if self._untrained_fingerprint.fits else self._untrained
        return StateTransfer(
            snapshot, _on_host(self._trained), _on_host(untrained), self._open_buffers.cpu(), dump(self._owners)
        )

    def install(self, transfer: StateTransfer, *, in_pass: bool, amid_step: bool) -> None:
        """Become what `transfer` says, in a forward pass, between a backward pass and the step, or between steps.

        What the loop does before its next forward pass is undone where the source had done it already (`reload`).
        """
        if in_pass:
            self._look()
        restore(transfer.params.to(self._trained[0].device), self._trained)
        if transfer.untrained.numel():
            restore(transfer.untrained.to(self._untrained[0].device), self._untrained)
        self._buffers = transfer.buffers
        self._restore_buffers()
        load(transfer.states, self._owners)
        self._was_installed = in_pass
        self._reload = transfer.states if transfer.snapshot.in_pass or amid_step else None
        self._settle_for(transfer.snapshot.version if in_pass else None)

    def _restore_buffers(self) -> None:
        if buffers := [*self._model.buffers()]:
            restore(self._buffers.to(buffers[0].device), buffers, unread_buffers(self._model))

    @property
    def came_from_a_pass(self) -> bool:
        """True if the latest state was installed from a rank in a forward or backward pass."""
        return self._reload is not None

    def reload(self) -> None:
        """Load installed states again: since then the loop may have stepped a scheduler, as the source's had before."""
        if self._reload is not None:
            load(self._reload, self._owners)
            self._reload = None

    def keep(self) -> None:
        """Remember this state: this rank's gradient was not used, and what the loop does now is to be undone."""
        if self._kept_states is None:
            self._kept_states = dump(self._owners)
        if self._kept_weights is None:
            self._kept_weights = flatten([*self._trained, *self._untrained])

    def undo(self, version: int, *, in_pass: bool) -> None:
        """Go back to what `keep` remembered; leaves other weights alone that the loop put in, unless `in_pass`."""
        restores_weights = self._kept_weights is not None and (in_pass or self.is_intact)
        if self._kept_states is not None:
            load(self._kept_states, self._owners)
            self._restore_buffers()
            self._kept_states = None
        if restores_weights and self._kept_weights is not None:
            if in_pass:
                self._look()
            restore(self._kept_weights, [*self._trained, *self._untrained])
            self._settle_for(version)
            self._kept_weights = None

    def accept(self) -> None:
        """Take the weights as they are now for right, and forget those that `keep` remembered."""
        self._kept_weights = None
        self.settle()

    def forget(self) -> None:
        """Forget all that was to be loaded or undone: a checkpoint was loaded."""
        self._reload = self._kept_states = self._kept_weights = None


def _on_host(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *(flatten([param]).cpu() for param in params)])


def pack(transfer: StateTransfer) -> bytes:
    """Return `transfer` as bytes."""
    file = io.BytesIO()
    torch.save((list(transfer.snapshot), *transfer[1:]), file)
    return file.getvalue()


def unpack(packed: bytes) -> StateTransfer:
    """Return what was packed, without running any of it; raises `DisagreementError` for other bytes."""
    return parse("state of another rank", packed, _transfer)


def _transfer(packed: bytes) -> StateTransfer:
    try:
        fields, *tensors = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError, AssertionError) as error:  # what torch raises for other bytes
        raise ValueError(str(error)) from error
    require(len(fields) == len(Snapshot._fields) and len(tensors) == len(StateTransfer._fields) - 1)
    require(all(isinstance(tensor, Tensor) and tensor.dtype == torch.uint8 for tensor in tensors))
    snapshot = Snapshot(*fields)
    require(isinstance(snapshot.order, list | None) and isinstance(snapshot.in_pass, bool))
    for each in (snapshot.version, snapshot.optimizer_steps, snapshot.session, *(snapshot.order or [])):
        parse_int(each)
    return StateTransfer(snapshot, *tensors)
