# SPDX-License-Identifier: Apache-2.0
"""Let a rank that was late in a step take the whole state of a rank that counted, from a server in each rank.

The state is weights, buffers and optimizer states, all of one version. Between the begin of a forward pass and the
optimizer's step only buffers change. So another rank may copy the state while this one computes; only the optimizer's
step waits until the copy is done. In collectives, and after its last step, a rank gives its weights as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from operator import attrgetter
from threading import Condition, Event
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import Store

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.state_server import StateServer, request_state
from commrt.errors import DeadlineExceeded, PeerLost, Place, QuorumLost
from commrt.runtime.world import World
from commrt.store.client import TimedStore, parse_int, typed
from commrt.store.launcher import LOOPBACK
from commrt.threads.deadline import Deadline, Timeouts
from commrt.training import model_state
from commrt.training.model_state import Stateful, dump, flatten, load, restore, unread_buffers
from commrt.training.riding import Riding

_log = logging.getLogger("commrt")
PASS_SHARE = 1 / 3
"""For this share of the time of a probe a source waits until it comes to its next forward pass."""
ENDS_TRAINING = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, they do not answer, or the process that holds the store is gone."""
AGAIN_S = 0.01
"""Between two rounds of questions."""
WRITES = attrgetter("_version")
"""Returns how often a parameter was written to, as autograd counts; it does not see ``param.data``."""


class Snapshot(NamedTuple):
    """Where a rank stands in training, besides its tensors."""

    version: int
    """The number of updates that it has applied."""
    optimizer_steps: int
    order: list[int] | None
    session: int
    """One more than the number of checkpoints loaded since `attach`."""
    in_pass: bool
    """The rank is in a forward or backward pass; its loop has stepped all schedulers of this version."""
    is_due: bool
    """An optimizer may yet step with the gradients of this version: the weights may lack its update."""
    stopping: list[int]
    """The ranks that have asked to stop."""


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
        self._model, self._trained, self._owners = model, trained, owners
        self._changed = Condition()
        self._snapshot: Snapshot | None = None  # None while no rank may copy
        self._version = -1  # the latest one with a forward pass
        self._writes: int | None = None  # to the weights, until the end of that version's first forward pass
        self._event: torch.cuda.Event | None = None
        self._readers = 0
        self._buffers = self._open_buffers = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.again: Tensor | None = None
        """States to load again when this one opens: until then the loop may do what the source's had done before."""
        self._kept: StateTransfer | None = None
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Take the buffers as they are now for those of this version: a forward pass changes them."""
        if buffers := [*self._model.buffers()]:
            self._buffers = flatten(buffers)

    def open(self, snapshot: Snapshot) -> None:
        """Let other ranks copy this state, which is that of `snapshot`."""
        if self.again is not None:
            load(self.again, self._owners)
            self.again = None
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
                params = torch.cat([flatten([param]).cpu() for param in self._trained])
                packed = pack(StateTransfer(snapshot, params, self._open_buffers.cpu(), dump(self._owners)))
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

    def install(self, transfer: StateTransfer, *, amid_step: bool) -> None:
        """Become what `transfer` says; `amid_step` between a backward pass and the optimizer's step."""
        restore(transfer.params.to(self._trained[0].device), self._trained)
        self._buffers = transfer.buffers
        if buffers := [*self._model.buffers()]:
            restore(self._buffers.to(buffers[0].device), buffers, unread_buffers(self._model))
        load(transfer.states, self._owners)
        self.again = transfer.states if transfer.snapshot.in_pass or amid_step else None

    def keep(self, snapshot: Snapshot) -> None:
        """Remember this state, the first of its version: the gradient was not used, and the loop's work is undone."""
        if self._kept is None or self._kept.snapshot.version != snapshot.version:
            self._kept = StateTransfer(snapshot, flatten(self._trained), self._buffers, dump(self._owners))

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
    return model_state.pack(list(transfer.snapshot), *transfer[1:])


def unpack(packed: bytes) -> StateTransfer:
    """Return what was packed, without running any of it; raises `DisagreementError` for other bytes."""
    snapshot, (params, buffers, states) = model_state.unpack(packed, _parse_snapshot, 3)
    return StateTransfer(snapshot, params, buffers, states)


def _parse_snapshot(fields: Any) -> Snapshot:
    snapshot = Snapshot(*typed(fields, int, int, list | None, int, bool, bool, list))
    for place in [*(snapshot.order or []), *snapshot.stopping]:
        parse_int(place)
    return snapshot


class CatchUp:
    """Fetch the state of other ranks for this one, and answer their questions for this rank's `state`."""

    def __init__(
        self, world: World, membership: ElasticMembership, store: Store, state: ReplicaState, riding: Riding
    ) -> None:
        self._world, self._membership, self._riding = world, membership, riding
        self._store = TimedStore(store, world.rank, lambda: world.timeout_s)
        towards = None if world.reconnect_options is None else world.reconnect_options.towards

        def give(number: int) -> Generator[bytes]:
            version, asks_to_stop = divmod(number, 2)  # a late rank has no gradients with which that could ride
            if asks_to_stop:
                riding.wants_stop = True
            return state.give(version, Timeouts.of(world.timeout_s).probe_s * PASS_SHARE)

        self._server = StateServer(towards or LOOPBACK, give)

    def close(self) -> None:
        """Answer no more questions."""
        self._server.close()

    def open(self) -> None:
        """Let other ranks ask this one."""
        self._store.set(f"service/{self._world.rank}", self._server.address)

    def fetch(self, version: int, sources: Sequence[int]) -> StateTransfer:
        """Return the state of `version`, or a later one, of the first of `sources` that can give it; waits for one.

        Raises `QuorumLost` if all sources are gone, `DeadlineExceeded` if none has the state in time.
        """
        limits = Timeouts.of(self._world.timeout_s)
        limit = Deadline(limits.collective_s, limits.probe_s + limits.step_s)
        while True:
            connected = self._membership.generation.connected
            for rank in sources:
                address = self._store.read(f"service/{rank}") if rank in connected else b""
                # A rank that has the state may take long to copy it.
                number = 2 * version + self._riding.wants_stop
                if address and (packed := request_state(address, number, limits.probe_s, limits.step_s)) is not None:
                    return unpack(packed)
                if limit.left_s <= 0:
                    break
            self._require_sources(version, sources, is_late=limit.left_s <= 0)
            Event().wait(AGAIN_S)

    def _require_sources(self, version: int, sources: Sequence[int], *, is_late: bool) -> None:
        membership = self._membership
        membership.require_open()
        members, place = membership.generation.members, Place(self._world.rank, sources[0], version)
        gone = {rank for rank in sources if rank not in members} | membership.on_store.gone(sources)
        if (is_late or len(gone) == len(sources)) and self._world.config is None:  # it is or was a member
            membership.on_store.current()  # raises Evicted if the others went on without this rank
        if len(gone) == len(sources):
            raise QuorumLost(
                f"only ranks {sources} had the weights of step {version}, and they are gone: start again from "
                "a checkpoint",
                place,
            )
        if is_late:
            raise DeadlineExceeded(
                f"this rank was late and needs the weights of one of ranks {sources}, but within "
                f"{self._world.timeout_s:g} s none of them came to its next forward pass or a collective, or closed "
                "its world, or what they sent did not arrive: look at their output, and at this host's network",
                place,
            )


class FinalCalls(list[Callable[[], object]]):
    """Calls to make once, before an error ends training."""

    def make(self, error: BaseException) -> None:
        """Make the calls if `error` ends training; logs what they raise."""
        if isinstance(error, ENDS_TRAINING) or isinstance(error.__cause__, ENDS_TRAINING):
            while self:
                try:
                    self.pop(0)()
                except Exception:  # the other calls are made, and `error` is raised
                    _log.exception("commrt: a function given to before_giving_up() failed")
