# SPDX-License-Identifier: Apache-2.0
"""Copy a rank's whole state while it trains: weights, buffers and optimizer states, all of one version.

Between the begin of a forward pass and the optimizer's step only buffers change. So another rank may copy the state
while this one computes; only the optimizer's step waits until the copy is done. In collectives, and after its last
step, a rank gives its weights as they are.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from operator import attrgetter
from pickle import UnpicklingError
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor, nn

from commrt.store.client import parse, parse_int, require
from commrt.training.model_state import Stateful, dump, flatten, load, restore, unread_buffers

__all__ = ["ReplicaState", "Snapshot", "StateTransfer", "pack", "unpack"]

WRITES = attrgetter("_version")
"""Returns how often a parameter was written to, as autograd counts; it does not see ``param.data``."""


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
    is_due: bool
    """An optimizer may yet step with the gradients of this version: the weights may lack its update."""


class StateTransfer(NamedTuple):
    """The state that a late rank takes over, as bytes."""

    snapshot: Snapshot
    params: Tensor
    buffers: Tensor
    states: Tensor


class ReplicaState:
    """The state of one rank: other ranks copy it while it is open, and it can become that of another rank.

    `owners` are what has state besides the model, such as optimizers and schedulers. The training thread opens and
    shuts; `give` answers other ranks, on threads of its own.
    """

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter], owners: Sequence[Stateful]) -> None:
        known = {*map(id, trained)}
        self._model, self._owners = model, owners
        self._trained = [param for param in model.parameters() if id(param) in known]
        self._changed = Condition()
        self._snapshot: Snapshot | None = None  # None while no rank may copy
        self._version = -1  # the latest one with a forward pass
        self._writes: int | None = None  # to the weights, until the end of that version's first forward pass
        self._event: torch.cuda.Event | None = None
        self._readers = 0
        self._buffers = self._open_buffers = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._reload: Tensor | None = None
        self._kept: tuple[int, Tensor, Tensor] | None = None
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Take the buffers as they are now for those of this version: a forward pass changes them."""
        if buffers := [*self._model.buffers()]:
            self._buffers = flatten(buffers)

    def open(self, snapshot: Snapshot) -> None:
        """Let other ranks copy this state, which is that of `snapshot`."""
        if snapshot.in_pass and self._version != snapshot.version:
            self._version, self._writes = snapshot.version, None
            self.keep_buffers()
        device = self._trained[0].device
        with self._changed:
            self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            self._snapshot, self._open_buffers = snapshot, self._buffers
            self._changed.notify_all()

    def after_forward(self, *_: object) -> None:
        """Let nobody copy weights that the loop moves after a version's first forward pass; a hook of the model."""
        if self._writes is None and torch.is_grad_enabled():
            self._writes = sum(map(WRITES, self._trained))

    def shut(self) -> None:
        """Wait for all copies, and allow no more: the weights are about to change."""
        with self._changed:
            self._snapshot = None
            while self._readers:
                self._changed.wait()

    def give(self, version: int, limit_s: float) -> Generator[bytes]:
        """Yield nothing once `version` or a later one can be copied, then a packed copy, if it is whole.

        Ends at once if it cannot be copied in time. Until then `shut` waits.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot is not None and self._snapshot.version >= version, limit_s)
            if (snapshot := self._snapshot) is None or snapshot.version < version:
                return
            self._readers += 1
        try:
            if self._is_whole(snapshot):
                yield b""
                params, states = _on_host(self._trained), dump(self._owners)
                packed = pack(StateTransfer(snapshot, params, self._open_buffers.cpu(), states))
                if self._is_whole(snapshot):
                    yield packed
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def _is_whole(self, snapshot: Snapshot) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return not snapshot.in_pass or self._writes in {None, sum(map(WRITES, self._trained))}

    def install(self, transfer: StateTransfer, *, amid_step: bool) -> bool:
        """Become what `transfer` says; `amid_step` between a backward pass and the optimizer's step.

        Return True if the loop may do before its next pass what the source had done already: then call `reload`.
        """
        restore(transfer.params.to(self._trained[0].device), self._trained)
        self._buffers = transfer.buffers
        self._restore_buffers()
        load(transfer.states, self._owners)
        self._reload = transfer.states if transfer.snapshot.in_pass or amid_step else None
        return self._reload is not None

    def _restore_buffers(self) -> None:
        if buffers := [*self._model.buffers()]:
            restore(self._buffers.to(buffers[0].device), buffers, unread_buffers(self._model))

    def reload(self) -> None:
        """Load installed states again: since then the loop may have stepped a scheduler, as the source's had before."""
        if self._reload is not None:
            load(self._reload, self._owners)
            self._reload = None

    def keep(self, version: int) -> None:
        """Remember this state, the first of its `version`: the gradient was not used, and the loop's work is undone."""
        if self._kept is None or self._kept[0] != version:
            self._kept = version, dump(self._owners), flatten(self._trained)

    def undo(self) -> None:
        """Go back to what `keep` remembered."""
        if self._kept is not None:
            _, states, weights = self._kept
            load(states, self._owners)
            restore(weights, self._trained)
            self._restore_buffers()
            self._kept = None

    def forget(self) -> None:
        """Forget all that was to be loaded or undone: a checkpoint was loaded."""
        self._reload = self._kept = None
        self._version = -1


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
    require(isinstance(snapshot.order, list | None))
    require(isinstance(snapshot.in_pass, bool) and isinstance(snapshot.is_due, bool))
    for each in (snapshot.version, snapshot.optimizer_steps, snapshot.session, *(snapshot.order or [])):
        parse_int(each)
    return StateTransfer(snapshot, *tensors)
