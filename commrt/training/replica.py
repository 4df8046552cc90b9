# SPDX-License-Identifier: Apache-2.0
"""One rank's attached model: what all ways to train share, and what its steps cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.engine import Span
from commrt.buckets.layout import Named
from commrt.buckets.weight_bucket import exchanged_tensors
from commrt.errors import UsageError
from commrt.runtime.membership import Loss, count_kept
from commrt.runtime.world import World
from commrt.schedule import Algorithm
from commrt.training.broadcast_state import gather_values, mean, overwrite_buffers, overwrite_model
from commrt.training.hooks import keep_alive, let_go
from commrt.training.model_state import Stateful, fingerprint
from commrt.training.step_guard import ParameterList, are_stepping, before_each_step, wrapped_as

__all__ = ["Replica", "Stats", "StepReport", "attached", "attached_to"]

MOST_STEPS = 1 << 53


class Replica(ABC):
    """One rank's attached model; made by `attach`.

    All methods belong to the thread that trains. Every rank must call those marked collective.
    """

    def __init__(self, model: nn.Module, params: Sequence[Named], algorithm: Algorithm, world: World) -> None:
        self.model = model
        self.last: StepReport | None = None
        """The latest step."""
        self._params, self._algorithm = params, algorithm
        self._parameters, self._averaged = ParameterList(model), {id(param) for _, param in params}
        self._given: Sequence[Optimizer] = ()
        self._world = world
        self._stats, self._step = Stats(), 0
        self._is_synchronous = True
        self._handles: list[RemovableHandle] = []

    def _live(self, handles: Sequence[RemovableHandle], optimizers: Sequence[Optimizer]) -> None:
        """Begin to act on `optimizers` and on what the `handles` stand for; `detach` removes these."""
        self._given = optimizers
        self._handles = [*handles, before_each_step(self._check_step)]
        _replicas.add(self)
        keep_alive(self, self._owners())

    def _owners(self) -> Iterator[nn.Module]:
        """Yield the modules that hold a parameter of this replica."""
        ours = {id(param) for _, param in self._params}
        for module in self.model.modules():
            if any(id(param) in ours for param in module.parameters(recurse=False)):
                yield module

    def _check_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of any optimizer that would let the replicas drift apart."""
        if optimizer not in self._given:
            self._check_stranger(optimizer)
            return
        if failure := self._world.unraised_failure:  # ended a transfer on a GPU after backward() had returned
            raise failure
        self._parameters.require_unchanged()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._averaged and param.grad is not None:
                    self._require_attached(param)
        if not are_stepping(self._given):
            self._refuse_writes()

    def _check_stranger(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that was not given, if it steps this model and passes nothing on."""
        if are_stepping(self._given):
            return
        names = self._parameters.names()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in names and param.grad is not None:
                    self._require_attached(param)
                    self._refuse_stranger(optimizer, names[id(param)])

    def _refuse_writes(self) -> None:  # noqa: B027  # only gossip and local SGD rely on weights between steps
        """Raise `UsageError` if somebody else has written parameters that an exchange relies on."""

    def _require_attached(self, param: Tensor) -> None:
        """Raise `UsageError` if `param`, which is to be stepped, belongs to no replica."""
        if id(param) not in self._averaged and not all(attached([param])):
            name = self._parameters.names().get(id(param), f"a parameter of shape {list(param.shape)}")
            raise UsageError(
                f"the optimizer steps {name}, which was frozen, absent or outside of the model when it was attached: "
                "commrt does not average its gradient; detach() and attach() again"
            )

    def _refuse_stranger(self, optimizer: Optimizer, name: str) -> None:
        """Raise `UsageError` unless `optimizer` passes its steps on to one that was given, or none was given."""
        if not self._given or any(wrapped_as(each, [optimizer]) for each in self._given):
            return
        inner = wrapped_as(optimizer, self._given)
        which = "all optimizers that step the model" if inner is None else f"{inner}, whose step() is called"
        raise UsageError(
            f"{type(optimizer).__name__} steps {name}, and was not given to attach(): detach(), and attach() again "
            f"with {which}"
        )

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._step

    def _restart_at_step(self, step: int) -> None:
        self._step = step

    @abstractmethod
    def average(self) -> None:
        """Take part in the exchange of this step without a backward pass; collective.

        A rank that has no batch for this step calls it in place of ``backward()``, while the others run theirs. In
        `no_sync`, where their passes only accumulate, it does nothing.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in this context; the first backward pass outside of it averages the sum."""
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
        """Wait for all exchanges that are in flight, and use their results. Collective with `LocalSGD` only.

        Call it before you save or look at weights.
        """

    def before_giving_up(self, call: Callable[[], object]) -> None:  # noqa: B027  # only backup workers need it
        """With backup workers: call `call` before an error ends training, to save a checkpoint; else never.

        The error is `QuorumLost`, or other ranks do not answer (`DeadlineExceeded`), or the store does not
        (`PeerLost`). The weights are those of the latest whole step of this rank; a late one has older ones.
        """

    def consolidate(self) -> None:
        """Make all replicas bitwise equal now: the mean of weights and of running means and variances; collective.

        Other buffers become rank 0's. Each rank's optimizers keep their state.
        """
        with self._world.collective("consolidate()"):
            self.drain()
            tensors = [slot.tensor() for slot in exchanged_tensors(self.model)]
            values = self._world.membership.together(lambda: mean(self._world, tensors, self.step))
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            self._world.membership.together(lambda: overwrite_buffers(self._world, self.model, self.step))

    def disagreement(self) -> float:
        """Return the distance of the farthest replica from the mean, relative to the mean's norm; collective.

        Costs two all-reduces. One is of all parameters in fp64, which adds up equal ones without rounding.
        """
        with self._collective("disagreement()"):
            self.drain()
            own, count = [param.detach().double() for _, param in self._params], len(self._world.members)
            parts = [count * tensor for tensor in own]
            sums = self._world.membership.together(lambda: mean(self._world, parts, self.step))
            pairs = [(tensor, value / count) for tensor, value in zip(own, sums, strict=True)]
            distance = sum(((tensor - value).square().sum().item() for tensor, value in pairs), 0.0)
            norm = sum((value.square().sum().item() for _, value in pairs), 0.0)
            share = (distance / norm) ** 0.5
            shares = self._world.membership.together(lambda: gather_values(self._world, share, self.step))
            return float(torch.tensor([*shares.values()], dtype=torch.float64, device="cpu").max())

    def overwrite_with_first(self) -> None:
        """Send parameters and buffers of rank 0 to all; collective, not inside `join`."""
        with self._collective("overwrite_with_first()"):
            self._world.membership.together(lambda: overwrite_model(self._world, self.model, self.step))

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's now; collective, not inside `join`."""
        with self._collective("sync_buffers()"):
            self._world.membership.together(lambda: overwrite_buffers(self._world, self.model, self.step))

    def replicas_equal(self) -> bool:
        """Return True if parameters and buffers are bitwise equal on all ranks; collective, not inside `join`.

        With backup workers, False if a rank has ended before the others did (see `consolidate`).
        """
        with self._collective("replicas_equal()"):
            return self._world.all_equal("replicas", fingerprint(self.model))

    def _collective(self, what: str) -> AbstractContextManager[None]:
        return self._world.collective(what)

    @property
    def lost(self) -> tuple[Loss, ...]:
        """The ranks that are lost, since when, and why; gossip of weights and backup workers go on without them.

        With backup workers the death of a rank that was not needed is noticed when ranks connect anew, or in a
        collective call.
        """
        return self._world.lost

    def stats(self) -> Stats:
        """Return the totals since `attach`."""
        return self._stats

    def why_not_graphs(self) -> dict[int, str]:
        """Return why buckets were not carried by a graph in the latest step; empty where none are tried."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the model and the optimizer."""
        return {"step": self.step, "algorithm": repr(self._algorithm)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; collective, raises `DisagreementError` if ranks load different steps."""
        step = self._step_in(state)
        with self._world.collective("load_state_dict()"):
            self._world.agree("load_state_dict", step=str(step))
            self._restart_at_step(step)

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
        let_go(self._owners())
        _replicas.discard(self)

    def close(self) -> None:
        """Detach; the world stays open. Safe to call twice."""
        self.detach()


_replicas: WeakSet[Replica] = WeakSet()


def attached(params: Iterable[Tensor]) -> list[bool]:
    """Return which of `params` have a replica."""
    taken = {id(param) for replica in _replicas for _, param in replica._params}  # noqa: SLF001  # of this module
    return [id(param) in taken for param in params]


def attached_to(world: World) -> int:
    """Return how many models are attached to `world`, without those that were dropped."""
    return count_kept(lambda: sum(replica._world is world for replica in _replicas))  # noqa: SLF001  # of this module


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, and what it cost this rank."""

    step: int
    members: tuple[int, ...]
    """The ranks that took part: whose gradients were averaged, or that gossiped with each other."""
    exposed_s: float
    """How long ``backward()`` waited at its end: for communication that the backward pass did not hide, and for a
    processor to run the communication thread."""
    spans: tuple[Span, ...]
    """The communication thread's work, bucket by bucket."""
    received_from: frozenset[int] = frozenset()
    """Gossip: the ranks whose values were mixed in."""
    counted: bool = True
    """True if this rank's gradient was used; with backup workers it may have come too late."""
    ended: bool = False
    """Backup workers: True if too few ranks still train, so that no gradient was used."""
    late_s: float = 0.0
    """Backup workers: how much later this rank's gradient was ready than the last one that counted. Without backups all
    ranks would have waited so long (clocks of hosts may differ)."""
    samples: int | None = None
    """Backup workers: the number of samples behind the gradients that counted, by the first dimension of the models'
    inputs; None if a member could not say."""
    dropped: tuple[int, ...] = ()
    """Backup workers: the ranks whose gradients did not count, because they were slow, stopped or gone."""
    saved_s: float = 0.0
    """Backup workers: how long all ranks would have waited in earlier steps, as late ranks report it now."""

    @property
    def comm_s(self) -> float:
        """Time for which the communication thread packed, transferred, reduced and unpacked."""
        return sum(span.end_s - span.begin_s for span in self.spans)

    @property
    def nbytes_sent(self) -> int:
        """Bytes that this rank sent."""
        return sum(span.nbytes_sent for span in self.spans)


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since `attach`; the fields are those of `StepReport`."""

    steps: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    nbytes_sent: int = 0
    received_from: frozenset[int] = frozenset()
    counted: int = 0
    """Steps in which this rank's gradient was used."""
    late_s: float = 0.0
    dropped: int = 0
    """Gradients of all ranks that were not used."""
    saved_s: float = 0.0
    samples: int = 0
    """Without the steps in which a member could not say."""

    def plus(self, report: StepReport) -> Stats:
        """Return the totals with one more step."""
        comm_s, nbytes_sent = self.comm_s, self.nbytes_sent
        for span in report.spans:
            comm_s += span.end_s - span.begin_s
            nbytes_sent += span.nbytes_sent
        return Stats(
            self.steps + 1,
            comm_s,
            self.exposed_s + report.exposed_s,
            nbytes_sent,
            self.received_from | report.received_from,
            self.counted + report.counted,
            self.late_s + report.late_s,
            self.dropped + len(report.dropped),
            self.saved_s + report.saved_s,
            self.samples + (report.samples or 0),
        )
