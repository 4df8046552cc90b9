# SPDX-License-Identifier: Apache-2.0
"""One rank's model, attached: what all ways to train it have in common."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.membership.generations import Loss
from commrt.model.anchor import drop, hold
from commrt.model.state import Stateful, fingerprint
from commrt.replicas.handover import Broadcasting, mean, of_each, overwrite_buffers, overwrite_model
from commrt.replicas.last_words import LastWords
from commrt.replicas.report import Stats, StepReport
from commrt.runtime.world import World
from commrt.schedule import Algorithm
from commrt.wire.buckets import Named

__all__ = ["Replica", "attached", "attached_to"]

MOST_STEPS = 1 << 53


class Replica(ABC):
    """One rank's model, attached; made by `attach`.

    All methods belong to the thread that trains. Those marked collective must be called by every rank.
    """

    def __init__(self, model: nn.Module, params: Sequence[Named], algorithm: Algorithm, lane: Broadcasting) -> None:
        self.model = model
        self.last: StepReport | None = None
        """The latest step."""
        self._params, self._algorithm, self._lane = params, algorithm, lane
        self._stats = Stats()
        self._is_synchronous = True
        self._handles: list[RemovableHandle] = []
        self._last_words = LastWords()

    def _live(self, handles: Sequence[RemovableHandle]) -> None:
        """From now on until `detach`."""
        self._handles = list(handles)
        _replicas.add(self)
        hold(self, self._owners())

    def _owners(self) -> Iterator[nn.Module]:
        ours = {id(param) for _, param in self._params}
        for module in self.model.modules():
            if any(id(param) in ours for param in module.parameters(recurse=False)):
                yield module

    @property
    @abstractmethod
    def step(self) -> int:
        """Steps so far."""

    @abstractmethod
    def _go_on_at(self, step: int) -> None: ...

    @abstractmethod
    def average(self) -> None:
        """Take part in the exchange of this step without a backward pass; collective.

        For a rank that has no batch for this step: in place of its ``backward()``, while the others run theirs. In
        `no_sync`, where theirs only accumulates, it does nothing.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate; the first one outside averages what has gathered."""
        before, self._is_synchronous = self._is_synchronous, False
        try:
            yield
        finally:
            self._is_synchronous = before

    @abstractmethod
    def join(self, *also: Stateful) -> AbstractContextManager[None]:
        """Let ranks run out of data at different times; collective, around the whole loop."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all that is under way, and use it; before weights are saved or looked at. Not collective."""

    def before_giving_up(self, call: Callable[[], object]) -> None:
        """With backup workers: call `call` on every survivor before an error ends its training, to save a checkpoint.

        The error is `QuorumLost`, or that others do not answer (`DeadlineExceeded`), or the store (`PeerLost`). The
        weights are then those of the last whole step that this rank has: a late one has older ones than the others.
        """
        self._last_words.append(call)

    def consolidate(self) -> None:
        """Make all replicas bitwise equal now: the mean of what is floating point, rank 0's of the rest; collective.

        Optimizers keep what each rank's have gathered.
        """
        with self._lane.world.gathered("consolidate()"):
            self.drain()
            buffers = (buffer for buffer in self.model.buffers() if buffer.is_floating_point())
            tensors = [param for _, param in self._params] + [*buffers]
            values = self._lane.world.elastic.together(lambda: mean(self._lane, tensors, self.step))
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            self._lane.world.elastic.together(lambda: overwrite_buffers(self._lane, self.model, self.step))

    def disagreement(self) -> float:
        """How far the farthest replica is from the mean of all, relative to the mean's norm; collective.

        Costs two all-reduces, one of them of all parameters in fp64, which adds up equal ones without rounding.
        """
        with self._lane.world.gathered("disagreement()"):
            self.drain()
            own, count = [param.detach().double() for _, param in self._params], len(self._lane.members)
            parts = [count * tensor for tensor in own]
            sums = self._lane.world.elastic.together(lambda: mean(self._lane, parts, self.step))
            pairs = [(tensor, value / count) for tensor, value in zip(own, sums, strict=True)]
            apart = sum(((tensor - value).square().sum().item() for tensor, value in pairs), 0.0)
            norm = sum((value.square().sum().item() for _, value in pairs), 0.0)
            own_share = (apart / norm) ** 0.5
            shares = self._lane.world.elastic.together(lambda: of_each(self._lane, own_share, self.step))
            return float(torch.tensor([*shares.values()], dtype=torch.float64, device="cpu").max())

    def overwrite_with_first(self) -> None:
        """Parameters and buffers of rank 0 to all; collective, not inside `join`."""
        with self._lane.world.gathered("overwrite_with_first()"):
            self._lane.world.elastic.together(lambda: overwrite_model(self._lane, self.model, self.step))

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's now; collective, not inside `join`."""
        with self._lane.world.gathered("sync_buffers()"):
            self._lane.world.elastic.together(lambda: overwrite_buffers(self._lane, self.model, self.step))

    def replicas_equal(self) -> bool:
        """True if parameters and buffers are bitwise equal on all ranks; collective, not inside `join`.

        With backup workers False where a rank has ended before the others did (`consolidate`).
        """
        with self._lane.world.gathered("replicas_equal()"):
            return self._lane.world.all_equal("replicas", fingerprint(self.model))

    @property
    def lost(self) -> tuple[Loss, ...]:
        """The ranks without which the others went on, since when, and why; gossip of weights and backup workers do.

        With backup workers a rank that died while it was not needed is noticed when ranks connect anew, or in a call
        of all.
        """
        return self._lane.world.lost

    def stats(self) -> Stats:
        """Totals since `attach`."""
        return self._stats

    def why_not_graphs(self) -> dict[int, str]:
        """The buckets that no graph carried in the latest step, with the reason; empty without ``graphs=True``."""
        return {}

    def state_dict(self) -> dict[str, int | str]:
        """What a checkpoint needs besides the model and the optimizer."""
        return {"step": self.step, "algorithm": repr(self._algorithm)}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue at the step of `state`; collective, raises `DisagreementError` if ranks load different steps."""
        step = self._step_in(state)
        with self._lane.world.gathered("load_state_dict()"):
            self._lane.world.agree("load_state_dict", step=str(step))
            self._go_on_at(step)

    @staticmethod
    def _step_in(state: object) -> int:
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST_STEPS:
            raise UsageError(f"a state without a step number: {state!r:.200}; pass what state_dict() returned")
        return step

    def detach(self) -> None:
        """Remove every hook; the model is a plain model again. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        drop(self._owners())
        _replicas.discard(self)

    def close(self) -> None:
        """Detach; the world stays open. Safe to call twice."""
        self.detach()


_replicas: WeakSet[Replica] = WeakSet()


def attached(params: Iterable[Tensor]) -> list[bool]:
    """Which of `params` have a replica."""
    taken = {id(param) for replica in _replicas for _, param in replica._params}  # noqa: SLF001  # of this module
    return [id(param) in taken for param in params]


def attached_to(world: World) -> int:
    """How many models are attached to `world`, without those that were dropped."""
    for pause_s in (0.0, 0.01, 0.1):
        if _of(world):
            Event().wait(pause_s)  # while another thread collects, this one would not
            gc.collect()  # a model and its hooks are a cycle
    return _of(world)


def _of(world: World) -> int:
    return sum(replica._lane.world is world for replica in _replicas)  # noqa: SLF001  # of this module
