# SPDX-License-Identifier: Apache-2.0
"""The state of a replica that a late rank takes, and what it needs to go on; and both as bytes.

It overwrites the model and what else has state (`owners`) with the state of another rank. Threads
of the state server copy it while this rank computes, as `ReplicaState` says.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from operator import attrgetter
from threading import Condition
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commrt.store.parsing import parse_int, typed
from commrt.training import packed_state
from commrt.training.stateful import Stateful, dump, load
from commrt.training.tensor_bytes import flatten, restore
from commrt.training.unread_buffers import unread_buffers

WRITES = attrgetter("_version")
"""Returns how often a parameter was written to, as autograd counts; it does not see ``param.data``.
"""


class Snapshot(NamedTuple):
    """Where a rank stands in training, besides its tensors."""

    version: int
    """The number of updates that it has applied."""
    optimizer_steps: int
    """The sum that ranks compare (`StepGuard.steps`)."""
    order: list[int] | None
    """The places of the parameters in the order in which gradients become ready, once known."""
    session: int
    """One more than the number of checkpoints loaded since `attach`."""
    in_pass: bool
    """The rank is in a forward or backward pass; its loop has stepped all schedulers of this
    version.
    """
    is_due: bool
    """An optimizer may yet step with the gradients of this version: the weights may lack its
    update.
    """
    stopping: list[int]
    """The ranks that have asked to stop."""


class StateTransfer(NamedTuple):
    """The state that a late rank takes over, as bytes."""

    snapshot: Snapshot
    params: Tensor
    buffers: Tensor
    states: Tensor


class ReplicaState:
    """The state of one rank: other ranks copy it while it is open, and it can become that of
    another rank.

    `owners` are what has state besides the model, such as optimizers and schedulers: a list to
    which `BackupWorkersReplica.join` adds. `give` answers other ranks, on threads of the state
    server; all else is for the training thread, and for that of its backward pass, where it waits.
    Between `open` and `shut`, `give` reads tensors and states while this rank computes: of a pass,
    its copy counts only if no weight was written meanwhile (`_is_whole`). `open`, `install` and
    `undo` load states into the owners, and the last two write the model.
    """

    def __init__(
        self, model: nn.Module, trained: Sequence[nn.Parameter], owners: Sequence[Stateful]
    ) -> None:
        self._model = model
        self._trained = trained
        self._owners = owners
        self._changed = Condition()  # held to write the next four, and notified
        self._snapshot: Snapshot | None = None  # None while no rank may copy
        self._event: torch.cuda.Event | None = None  # of all work on the weights before `open`
        self._open_buffers = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._readers = 0  # generators of `give` that copy now
        self._version = -1  # the latest one with a forward pass
        # to the weights, until the end of that version's first forward pass; `give` only reads it
        self._writes: int | None = None
        self._buffers = self._open_buffers  # of the version that is next to open
        self.again: Tensor | None = None
        """States to load again when this one opens: until then the loop may do what the source's
        had done before. Only written here.
        """
        self._kept: StateTransfer | None = None
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Take the buffers as they are now for those of this version:
        a forward pass changes them.
        """
        if buffers := [*self._model.buffers()]:
            self._buffers = flatten(buffers)

    def open(self, snapshot: Snapshot) -> None:
        """Let other ranks copy this state, which is that of `snapshot`."""
        if self.again is not None:
            load(self.again, self._owners)
            self.again = None
        if snapshot.in_pass and self._version != snapshot.version:
            self._version = snapshot.version
            self._writes = None
            self.keep_buffers()
        device = self._trained[0].device
        with self._changed:
            self._event = (
                torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            )
            self._snapshot = snapshot
            self._open_buffers = self._buffers
            self._changed.notify_all()

    def after_forward(self, *_: object) -> None:
        """Let nobody copy weights that the loop moves after a version's first forward pass; a hook
        of the model.
        """
        if self._writes is None and torch.is_grad_enabled():
            self._writes = sum(map(WRITES, self._trained))

    def shut(self) -> None:
        """Wait for all copies, and allow no more: the weights are about to change."""
        with self._changed:
            self._snapshot = None
            while self._readers:
                self._changed.wait()

    def give(self, version: int, limit_s: float) -> Generator[bytes]:
        """Yield no bytes once `version` or a later one can be copied, then a packed copy, if it is
        whole.

        Ends at once if it cannot be copied in time. Until then `shut` waits.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._snapshot is not None and self._snapshot.version >= version, limit_s
            )
            if (snapshot := self._snapshot) is None or snapshot.version < version:
                return
            self._readers += 1
        try:
            if self._is_whole(snapshot):
                yield b""
                params = torch.cat([flatten([param]).cpu() for param in self._trained])
                packed = pack(
                    StateTransfer(snapshot, params, self._open_buffers.cpu(), dump(self._owners))
                )
                if self._is_whole(snapshot):
                    yield packed
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def _is_whole(self, snapshot: Snapshot) -> bool:
        """Return True if the weights are still those of `snapshot`; waits for the GPU's work."""
        if self._event is not None:
            self._event.synchronize()
        return not snapshot.in_pass or self._writes in {None, sum(map(WRITES, self._trained))}

    def install(self, transfer: StateTransfer, *, amid_step: bool) -> None:
        """Become what `transfer` says; `amid_step` between a backward pass and the optimizer's
        step. Shuts.
        """
        self.shut()  # a loop may have left out the optimizer's step, which does that
        restore(transfer.params.to(self._trained[0].device), self._trained)
        self._buffers = transfer.buffers
        if buffers := [*self._model.buffers()]:
            restore(self._buffers.to(buffers[0].device), buffers, unread_buffers(self._model))
        load(transfer.states, self._owners)
        self.again = transfer.states if transfer.snapshot.in_pass or amid_step else None

    def keep(self, snapshot: Snapshot) -> None:
        """Remember this state, the first of its version: the gradient was not used, and the loop's
        work is undone.
        """
        if self._kept is None or self._kept.snapshot.version != snapshot.version:
            self._kept = StateTransfer(
                snapshot, flatten(self._trained), self._buffers, dump(self._owners)
            )

    def undo(self) -> None:
        """Go back to what `keep` remembered."""
        if self._kept is not None:
            self.install(self._kept, amid_step=False)
            self._kept = None

    def forget(self) -> None:
        """Forget all that was to be given, loaded or undone: a checkpoint was loaded."""
        self.shut()
        self.again = self._kept = None
        self._version = -1


def pack(transfer: StateTransfer) -> bytes:
    """Return `transfer` as bytes."""
    return packed_state.pack(list(transfer.snapshot), *transfer[1:])


def unpack(packed: bytes) -> StateTransfer:
    """Return what was packed, without running any of it; raises `DisagreementError` for other
    bytes.
    """
    snapshot, (params, buffers, states) = packed_state.unpack(packed, _parse_snapshot, 3)
    return StateTransfer(snapshot, params, buffers, states)


def _parse_snapshot(fields: Any) -> Snapshot:
    snapshot = Snapshot(*typed(fields, int, int, list | None, int, bool, bool, list))
    for place in [*(snapshot.order or []), *snapshot.stopping]:
        parse_int(place)
    return snapshot
