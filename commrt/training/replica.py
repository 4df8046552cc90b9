# SPDX-License-Identifier: Apache-2.0
"""One rank's attached model: what users call, as far as all ways to train share it.

On the thread that trains. `optimizer_steps` looks at optimizers, `model_collectives` compares and
sends models, `gradient_weights` and `riding` have what gradients weigh and what rides with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Literal
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.digest import Digest
from commrt.buckets.tensors import Named
from commrt.errors import UsageError
from commrt.other_names import IN_REPLICA, hinting
from commrt.runtime.generation import Loss
from commrt.store.client import call_store
from commrt.store.environment import is_on
from commrt.store.live import Record, base_of, read
from commrt.store.parsing import MALFORMED, parse_int
from commrt.training.gradient_weights import GradientWeights
from commrt.training.model_collectives import (
    farthest_from_mean,
    overwrite_model,
    overwrite_states,
    require_equal_digests,
    take_means,
)
from commrt.training.optimizer_steps import OptimizerSteps
from commrt.training.parameter_list import ParameterList
from commrt.training.request import Request
from commrt.training.riding import Riding, Rode
from commrt.training.riding_rules import ALL_MAY_RIDE, RidingRules
from commrt.training.stateful import Stateful
from commrt.training.step_report import Stats, StepReport
from commrt.training.step_table import table_of
from commrt.training.tensor_bytes import fingerprint
from commrt.training.uncopied import ATTRIBUTE, Keeper

INTERNAL = frozenset({"buckets", "come", "drops_gradients", "waits_for"})
"""Names of a replica that are for commrt itself: ``dir()`` leaves them out."""


@hinting("replica", IN_REPLICA)
class Replica(ABC):
    """One rank's attached model; made by `attach`.

    Subclasses call `_live` last in `__init__`, and write `last`, `_stats` and `_step` where a step
    ends; backup workers add to `_dropped`.

    All belongs to the thread that trains, but `stop` and `waits_for`, which are for any; hooks of
    gradients run on that of the backward pass, for which it waits. Every rank must call those
    methods that are marked collective.
    """

    drops_gradients = False
    """True if a step may use the gradients of some ranks only, `StepReport.members`."""

    def __init__(
        self,
        request: Request,
        params: Sequence[Named],
        rules: RidingRules = ALL_MAY_RIDE,
        watched: Digest | None = None,
    ) -> None:
        """`params` are those averaged; with ``watch=True`` `watched` must be equal on all ranks."""
        self.model = request.model
        """The model, as it was given to `attach`."""
        self.last: StepReport | None = None
        """The report of the latest step; None before the first."""
        self._copies = request.copies
        self._params = params
        self._optimizers = request.optimizers
        self._algorithm = request.algorithm
        self._world = request.world
        self._parameters = ParameterList(request.model)
        self._stats = Stats()
        self._dropped = Counter[int]()  # by rank, steps that did not use its gradients
        self._step = 0
        self._attached_s = perf_counter()
        self._is_synchronous = True  # False in no_sync()
        self._rules = rules
        self._steps: OptimizerSteps  # from `_live` on
        self._handles: list[RemovableHandle] = []  # of hooks; none once it was detached
        self._weights = GradientWeights(params)
        self._riding = Riding(request.world.rank, self._weights)
        self._watched = watched

    def _live(
        self,
        handles: Iterable[RemovableHandle],
        before_step: Callable[..., Any],
        after_step: Callable[[Optimizer], None],
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Begin to act on optimizers' steps (`OptimizerSteps`); `detach` removes `handles`.

        From then on the modules that hold a parameter keep this replica alive (`Keeper`).
        """
        self._handles += handles
        self._steps = OptimizerSteps(
            self._world,
            self._parameters,
            [param for _, param in self._params],
            self._optimizers,
            before=before_step,
            after=after_step,
            checks=checks,
        )
        self._steps.begin()
        self._world.trained = ref(self)
        for module in self._owners():
            module.__dict__[ATTRIBUTE] = Keeper([self])

    def _owners(self) -> Iterator[nn.Module]:
        """Yield the modules that hold a parameter of this replica."""
        for module in self.model.modules():
            if any(id(param) in self._steps.averaged for param in module.parameters(recurse=False)):
                yield module

    def __repr__(self) -> str:
        world = self._world
        ranks = f"rank {world.rank} of {len(world.members)} over {world.transport.kind}"
        where = ranks if self._handles else "detached"
        model = type(self.model).__name__
        return f"<Replica of {model} at step {self.step}: {self._algorithm!r}, {where}>"

    def __dir__(self) -> list[str]:
        hidden = INTERNAL | IN_REPLICA.keys()
        return sorted(name for name in super().__dir__() if name[0] != "_" and name not in hidden)

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._step

    @property
    def waits_for(self) -> int | None:
        """The bucket for which ``backward()`` waits now, for who watches on any thread.

        None while this rank computes, and where replicas do not wait in each step.
        """
        return None

    def _restart_at_step(self, step: int) -> None:
        self._step = step

    @abstractmethod
    def average(self) -> None:
        """Take part in the exchange of this step without a backward pass; collective.

        A rank that has no batch for this step calls it in place of ``backward()``, while the others
        run theirs. In `no_sync`, where their passes only accumulate, it does nothing.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients here; the first backward pass outside averages the sum."""
        before = self._is_synchronous
        self._is_synchronous = False
        try:
            yield
        finally:
            self._is_synchronous = before

    @abstractmethod
    def join(self, *also: Stateful) -> AbstractContextManager[None]:
        """Let ranks run out of data at different times; collective, around the whole loop."""

    def weigh(
        self, loss: Tensor, weight: float, *, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Let the gradients of `loss` count for `weight`: averages are means of all that weighs.

        `loss` is the mean of `weight` parts, such as tokens, or with ``reduction="sum"`` their sum.
        Over micro-batches m and ranks, the average is then
        ``sum(weight[m] * grad(mean_loss[m])) / sum(weight[m])``. Call it
        for the loss of each backward pass, on all ranks, and pass to ``backward()`` what it
        returns, which is `loss` itself, or what a `GradScaler` makes of it; do not divide it by the
        number of micro-batches. Gradients of all that this loss reaches are multiplied by the
        weight until they are averaged, those of other models too, so give each a loss of its own. A
        weight of 0 counts for nothing, if the loss is finite. Put all but the last pass into
        `no_sync`.

        Raises `UsageError` for a negative, infinite or NaN weight, and for one on a GPU, for which
        each step would wait; `DisagreementError` in ``backward()`` if some ranks weigh their
        gradients and others do not, or if all weigh nothing.
        """
        self._rules.require_weights("weigh()", self._algorithm)
        self._weights.weigh(loss, weight, reduction, self._holds_means)
        return loss

    def ride(self, **numbers: float) -> None:
        """Let a few `numbers` of this rank travel with the gradients of the next step, for nothing.

        Call it before the backward pass ends, and read `rode` when ``backward()`` has returned. All
        ranks that give numbers in a step give the same names, at most eight. They travel as
        float64, on every wire. Raises `UsageError` for a second number of one name in a step: if
        you accumulate, add up over the passes, and call it once, before the last one.
        """
        self._rules.require_riders("ride()", self._algorithm)
        self._riding.ride(numbers)

    @property
    def rode(self) -> Mapping[str, Rode]:
        """The latest step's numbers, of all ranks that sent some; empty on one that sent none."""
        return self._riding.rode

    def stop(self) -> None:
        """Ask all ranks to stop; may be called by a signal handler, on any thread.

        All ranks see it in `stopping` after the same step: this one, if its backward pass has only
        begun, or the next. Of backup workers, a rank whose gradients come too late says it when it
        catches up, up to a few steps later. In `join`, one that has no data left says nothing more.
        """
        if self._handles:  # else the model was detached, and a handler may still call this
            self._rules.require_wishes("stop()", self._algorithm)
        self._riding.wants_stop = True

    def _holds_means(self) -> bool:
        """Return True if ``param.grad`` holds averages neither used nor set to zeros."""
        return False

    @property
    def stopping(self) -> tuple[int, ...]:
        """The ranks that have asked to stop, equal on all ranks after each step; else empty.

        For a late rank of backup workers, the rank that gave it its state has asked. Not the same
        after ``join()``: read it inside. Raises `UsageError` where `stop` does.
        """
        if self._handles:  # a model that was detached has no news
            self._rules.require_wishes("stopping", self._algorithm)
        return self._riding.stopping

    def skip(self) -> None:
        """Ask all ranks not to use the gradients of the step that comes next, or runs backward.

        Once ``backward()`` has returned, gradients are equal on all ranks, and so is what each of
        them sees in them.
        """
        self._rules.require_wishes("skip()", self._algorithm)
        self._riding.skip()

    @property
    def skipping(self) -> tuple[int, ...]:
        """The ranks that asked to skip the latest step; if any, call no ``optimizer.step()``."""
        self._rules.require_wishes("skipping", self._algorithm)
        return self._riding.skipping

    def drain(self) -> None:  # noqa: B027  # between synchronous steps nothing is in flight
        """Wait for all exchanges in flight, and use them; collective with `LocalSGD` only.

        Call it before you save or look at weights.
        """

    def before_giving_up(self, call: Callable[[], object]) -> None:
        """Let backup workers call `call` before an error ends training, to save a checkpoint.

        Other algorithms never call it. The error is `QuorumLost`, or other ranks do not answer
        (`DeadlineExceeded`), or the store does not (`PeerLost`). The weights are those of the
        latest whole step of this rank; a late one has older ones.
        """
        if not callable(call):
            raise UsageError(
                f"before_giving_up({call!r:.80}): give a function to call, not a value"
            )

    def consolidate(self) -> None:
        """Make all replicas bitwise equal now; collective.

        Weights, and running means and variances, become the mean. Other buffers become rank 0's.
        Each rank's optimizers keep their state.
        """
        with self._world.collective("consolidate()"):
            self.drain()
            self._copies.find()
            take_means(self._world, self.model, self.step)
            self._copies.settle()
            self._take_from_first(buffers_only=True)

    def disagreement(self) -> float:
        """Return the farthest replica's distance from the mean, relative to its norm; collective.

        Costs two all-reduces. One is of all parameters in fp64, which adds up equal ones without
        rounding.
        """
        with self._collective("disagreement()"):
            self.drain()
            params = [param for _, param in self._params]
            return farthest_from_mean(self._world, params, self.step)

    def overwrite_with_first(self) -> None:
        """Send parameters and buffers of rank 0 to all; collective, not inside `join`."""
        with self._collective("overwrite_with_first()"):
            self._take_from_first()

    def sync_buffers(self) -> None:
        """Overwrite this rank's buffers with rank 0's now; collective, not inside `join`."""
        with self._collective("sync_buffers()"):
            self._take_from_first(buffers_only=True)

    def _take_from_first(self, *, buffers_only: bool = False) -> None:
        world = self._world
        if not buffers_only:
            self._copies.find()
        world.membership.together(
            lambda: overwrite_model(world, self.model, self.step, buffers_only=buffers_only)
        )
        if not buffers_only:
            world.membership.together(
                lambda: overwrite_states(world, self._copies.owners(), self.step)
            )

    def replicas_equal(self) -> bool:
        """Return True if weights and buffers are bitwise equal; collective, not inside `join`.

        With backup workers, False if a rank has ended before the others did (see `consolidate`).
        """
        with self._collective("replicas_equal()"):
            return self._world.all_equal("replicas", fingerprint(self.model))

    def _compare_replicas(self) -> None:
        """Raise `DisagreementError` if somebody watches and weights differ; collective."""
        if self._watched is not None:
            with self._world.collective("watch"):
                require_equal_digests(self._world, self._watched, self.step)

    def _collective(self, what: str) -> AbstractContextManager[None]:
        return self._world.collective(what)

    @property
    def lost(self) -> tuple[Loss, ...]:
        """The ranks that are lost, since when, and why; not those that were replaced (`report`).

        Gossip of weights and backup workers go on without them. With backup workers the death of a
        rank that was not needed is noticed when ranks connect anew, or in a collective call.
        """
        return self._world.lost

    def stats(self) -> Stats:
        """Return the totals since `attach`."""
        return self._stats

    def report(self) -> str:
        """Return a table as text: where this rank's time went since `attach`, and who is late.

        Not collective. Which rank is late it knows if the job runs with ``COMMRT_LIVE=1``; then it
        reads the store. With backup workers it says how often each rank's gradients were dropped
        in the steps that this rank knows of: all but those in which it was a whole step behind. A
        line says which ranks were lost and replaced since the start of this process, and when.
        """
        world = self._world
        records: Sequence[Record] = ()
        if is_on("COMMRT_LIVE") and not world.closed:
            records = call_store(lambda: read(base_of(world.store)), rank=world.rank)
        title = f"rank {world.rank} of {world.size}"
        passed_s = perf_counter() - self._attached_s
        dropped = self._dropped if self.drops_gradients else None
        history = world.membership.history
        return table_of(title, self.stats(), passed_s, records, dropped, history)

    def why_not_graphs(self) -> dict[int, str]:
        """Return why no graph carried buckets in the latest step; empty where none are tried."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the model and the optimizer."""
        return {"step": self.step, "algorithm": repr(self._algorithm)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; collective.

        Raises `DisagreementError` if ranks load different steps.
        """
        step = self._step_in(state)
        with self._world.collective("load_state_dict()"):
            self._world.agree("load_state_dict", step=str(step))
            self._restart_at_step(step)

    @staticmethod
    def _step_in(state: Any) -> int:
        try:
            return parse_int(state["step"])
        except MALFORMED:
            what = f"a state without a step number: {state!r:.200}; pass what state_dict() returned"
            raise UsageError(what) from None

    def detach(self) -> None:
        """Remove every hook: the model is a plain one again. Not collective; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self._owners():
            module.__dict__.pop(ATTRIBUTE, None)
        self._steps.end()
        self._rules = RidingRules("its model was detached")
