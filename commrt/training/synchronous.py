# SPDX-License-Identifier: Apache-2.0
"""Synchronous training: gradients are averaged while the backward pass still runs.

Replicas stay bitwise equal. Used on the thread that trains; hooks of gradients run on that of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from commrt.buckets.averaging import AveragingEngine
from commrt.buckets.digest import Digest
from commrt.buckets.engine import Span
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.view_bucket import ViewBucket
from commrt.buckets.weight_watch import WeightWatch
from commrt.errors import UsageError
from commrt.runtime.prepared import Members
from commrt.runtime.wire import is_quantized
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, within_range
from commrt.training.flat_buffer import FlatBuffer
from commrt.training.hooks import (
    INTERRUPTED,
    PassEnd,
    current_pass,
    on_counted_gradients,
    on_dense_gradients,
)
from commrt.training.model_collectives import gather_integers, overwrite_model, overwrite_states
from commrt.training.replica import Replica
from commrt.training.request import Request, describe_buffers
from commrt.training.residuals import own_residuals
from commrt.training.riding import FEEDBACK
from commrt.training.stateful import Stateful, check_stateful
from commrt.training.step_guard import StepGuard
from commrt.training.step_report import StepReport
from commrt.training.unread_buffers import unread_buffers

TWICE = (
    "the gradient of {name} became ready twice in one backward pass. Reentrant activation"
    " checkpointing does that: use checkpoint(..., use_reentrant=False)"
)
_kind = attrgetter("dtype", "shape")
EVEN = 0.5
"""The share of a partner's gradients, where ranks gossip them, in which slots stay exact."""
# autograd says -1 outside of a pass
LATE = -2
BY_HAND = -3
"""In place of a pass's number: averaging in the optimizer's step, and by `Replica.average`."""


def attach(request: Request) -> Replica:
    """Return a replica whose gradients are averaged in the backward pass. Collective."""
    on_gpu = request.params[0][1].device.type == "cuda"
    graphs = on_gpu if request.graphs is None else request.graphs
    buckets = request.build_buckets(request.params[::-1])
    flags = {
        "graphs": graphs and not is_quantized(request.wire),
        "same_bits": request.same_bits,
    }
    engine = AveragingEngine(request.world, request.algorithm, buckets, **flags)
    broadcasts = request.broadcast_buffers and not engine.mixes
    return request.open(
        engine.schedule(0, request.world.size),
        buckets,
        partial(SynchronousReplica, request, engine, broadcast_buffers=broadcasts),
        flags={"broadcast_buffers": broadcasts, **flags},
        prepare=lambda: engine.submit_preparation(0, engine.everybody).result(),
    )


def _no_weights(engine: AveragingEngine, request: Request) -> str:
    """Return why gradients cannot weigh; "" if they can."""
    if request.same_bits:
        return (
            "same_bits=True, as the first bucket is multiplied after its sum: attach without one of"
            " them"
        )
    if any(bucket.wire.dtype == torch.float16 for bucket in engine.buckets):
        if engine.mixes:
            return "gossip in float16, whose range weights leave: use wire=torch.bfloat16"
        if not engine.buckets[0].unpacks_wire:
            return 'gradients="views" in float16, whose range weights leave: leave views out'
    return ""


class SynchronousReplica(Replica):
    """Has the same gradients as all other replicas when ``backward()`` returns.

    A step is `_begin` at the first gradient of a backward pass, `_submit` for each bucket that is
    complete, and `_finish` at the end of the pass, which waits. The communication thread averages a
    bucket (`Engine.reduce_now`): `GradientBucket.pack` scales it, `BoundProgram.run` sends and
    adds, `GradientBucket.unpack` writes ``param.grad``. After an error in between the step never
    ends: this rank has sent only a part of what the others wait for.
    """

    def __init__(
        self, request: Request, engine: AveragingEngine, *, broadcast_buffers: bool
    ) -> None:
        named = [named for bucket in engine.buckets for named in bucket.params]
        super().__init__(request, named)
        self._engine = engine
        self._build_buckets = request.build_buckets
        if getattr(request.algorithm, "share", EVEN) != EVEN:
            self._refuses = "a share other than 1/2 would round what rides; leave weight= out"
        params = [param for _, param in named]
        self._guard = StepGuard(
            self._optimizers, params, partial(self._average, LATE), request.scales
        )
        self._alone = self._world.size == 1
        views = [bucket for bucket in engine.buckets if isinstance(bucket, ViewBucket)]
        self._moves_in = any(bucket.moves_in for bucket in views) and not self._alone
        self._order = engine.order
        self._order_is_observed = False
        buffers = [*self.model.buffers()]
        self._broadcasts_buffers = broadcast_buffers and not self._alone
        self._buffer_kinds = [*map(_kind, buffers)]
        carries = self._broadcasts_buffers and buffers
        self._flat_buffers = (
            FlatBuffer(buffers, self._world.transport.allocate_shared) if carries else None
        )
        if self._flat_buffers is not None and self._flat_buffers.flat.numel():
            engine.share(self._flat_buffers.flat)
        if engine.buckets[0].residual is not None:
            self._refuses_weights = FEEDBACK
        self._refuses_weights = self._refuses_weights or _no_weights(engine, request)
        if engine.mixes:
            self._refuses_wishes = (
                "only partners hear of it in a step: use gossip of weights, or an all-reduce"
            )
        self._number: int | None = None  # of the backward pass whose gradients are on their way
        # what all ranks must agree on in this step; the first bucket says it
        self._header = engine.buckets[0].header
        if request.watch and not self._alone:
            self._watched = Digest([*self.model.parameters()])
        self._looked: Future[None] | None = None
        # in join(), which ranks still have data
        self._has_data: Future[Members] | None = None
        self._members = engine.everybody
        self._in_flight: list[Future[Span]] = []
        self._live(self._gradient_hooks(), self._guard.before_step, self._guard.after_step)

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """The buckets, in the order in which they leave."""
        return self._engine.buckets

    def _gradient_hooks(self) -> Iterator[RemovableHandle]:
        """Count gradients; those that live on the wire may move there one by one."""
        if self._moves_in:
            return on_dense_gradients(self, self._params, SynchronousReplica._on_gradient)
        full = SynchronousReplica._on_full_bucket
        other = SynchronousReplica._on_gradient
        return on_counted_gradients(self, self._params, self._order, full, other)

    def _on_gradient(self, name: str) -> None:
        """Count a gradient that is the first of its pass, or moves to the wire."""
        number = current_pass()
        if not self._is_synchronous:
            self._guard.held_back = True
            self._riding.count_pass(number)
            return
        if self._number != number:
            self._begin_pass(number, f"the gradient of {name}")
        elif name in self._order.not_awaited:
            raise UsageError(TWICE.format(name=name))
        leaving = self._order.mark(name)
        if self._moves_in and self._world.joined is None:  # there, only `_has_data` tells the scale
            bucket = self._engine.buckets[self._order.not_awaited[name]]
            cast("ViewBucket", bucket).move_in(name, self._engine.scale(self._world.size))
        if leaving:
            self._submit(leaving)

    def _begin_pass(self, number: int, what: str) -> None:
        if not self._riding.is_idle:
            self._riding.count_pass(number)  # or refuse it, before the step begins
        self._begin(number, what)
        PassEnd(self._finish, self._order.disarm)
        self._order.arm()  # last: what fails before leaves no gradient awaited

    def _on_full_bucket(self) -> None:
        if (number := current_pass()) != self._number:  # an error interrupted the pass before
            self._begin_pass(number, "a gradient")
        self._submit(self._order.full())

    def _holds_means(self) -> bool:
        # of several, each may have its own passes
        return len(self._optimizers) == 1 and self._guard.is_due

    def average(self) -> None:
        """Average the gradients at hand now; see `Replica.average`."""
        if self._is_synchronous:
            self._average(BY_HAND)

    def _average(self, number: int) -> None:
        if self._number != current_pass():
            self._riding.forget_thrown_away()
            self._begin(number, "average()")
            self._order.arm()
            try:
                self._finish()
            finally:
                self._order.disarm()

    def _begin(self, number: int, what: str) -> None:
        """Start the step of backward pass `number`; refuse `what` of it inside of another pass."""
        if self._number is not None and not self._alone and not self._world.closed:
            raise UsageError(INTERRUPTED.format(what=what))
        if self._world.joined not in (None, self):
            raise UsageError(
                "another model of this world is in join(): ranks that left it answer for that model"
                " only"
            )
        self._parameters.require_unchanged()
        self._number = number
        self._in_flight = []
        self._engine.own_weight = self._riding.own_weight
        if not self._alone:
            steps, settings = self._guard.close(self._step)
            late = int(number == LATE)
            first = self._engine.buckets[0].header
            self._header = first._replace(
                late=late, optimizer_steps=steps, step=self._step, settings=settings
            )
        if self._watched is not None:
            watch = partial(cast("WeightWatch", self._engine.buckets[0].watch).begin, self._watched)
            self._looked = self._world.comm_thread.submit(watch)
        # In join() ranks may have left, so each step begins with the question who has data.
        self._has_data = (
            None if self._world.joined is None else self._engine.submit_has_data(True, self._step)
        )

    def _submit(self, indices: Iterable[int], *, waits: bool = False) -> None:
        for i in indices:
            bucket = self._engine.buckets[i]
            header = self._header if i == 0 else bucket.header
            backward = None if self._number in (LATE, BY_HAND) else self._number
            leaving = None
            if bucket.riders is not None:
                leaving = self._riding.leave(backward, is_mixed=self._engine.mixes)
            if not self._alone:
                bucket.take(header, self._order.not_awaited, leaving)
            else:
                bucket.require_dense(leaving)
            answer = self._engine.submit(bucket, self._step, self._has_data, waits=waits)
            self._in_flight.append(answer)

    def _finish(self) -> None:
        """Send what is left, and wait until all averages are in ``param.grad``."""
        begin_s = perf_counter()
        self._submit(self._order.rest(), waits=True)
        # which the backward pass may have changed
        buffers = self._submit_buffers() if self._broadcasts_buffers else []
        if self._has_data is not None:
            # first: if it failed, the others only know that something did
            self._members = self._has_data.result()
        if self._looked:
            self._looked.result()
        listener = self._world.comm_thread.listener
        with NOTHING if listener is None else within_range(listener, "wait", step=self._step):
            spans = tuple(map(Future.result, self._in_flight))
        if not self._alone:
            for bucket in self._engine.buckets:
                bucket.assign_missing()
        if self._flat_buffers is not None:
            self._flat_buffers.write_back(buffers, unread_buffers(self.model))
        first = self._engine.buckets[0]
        self._riding.unread = first.riders
        if first.weight is not None and self._world.joined is None and not self._engine.mixes:
            self._riding.use_unit(first.weight / self._world.size)
        self.last = StepReport(self._step, self._members, perf_counter() - begin_s, spans)
        self._stats = self._stats.plus(self.last)
        self._number = None
        self._step += 1
        if not self._order_is_observed and self._world.joined is None:
            self._observe_order()
        if self._engine.graphs is not None:
            self._engine.capture_graphs(self._engine.graphs, self._step)
        self._guard.open()

    def _submit_buffers(self) -> list[Tensor]:
        buffers = [*self.model.buffers()]
        if [*map(_kind, buffers)] != self._buffer_kinds:
            raise UsageError(
                "the buffers' dtypes or shapes have changed since attach(), now"
                f" {describe_buffers(self.model)}: keep them as they are, or attach with"
                " broadcast_buffers=False"
            )
        if self._flat_buffers is not None:
            self._flat_buffers.fill(buffers)
            flat = self._flat_buffers.flat
            answer = self._engine.submit_broadcast(flat, self._step, self._has_data)
            self._in_flight.append(answer)
        return buffers

    def _observe_order(self) -> None:
        """Rebuild the buckets in the order in which rank 0's gradients became ready."""
        self._riding.read()  # from memory that other buckets may take
        order = torch.tensor(self._order.places(), device="cpu")
        self._engine.submit_broadcast(order, self._step).result()
        self._reorder(order.tolist())

    def _reorder(self, places: Sequence[int]) -> None:
        """Rebuild the buckets with the parameters at `places` in this order, for good."""
        self._order_is_observed = True
        if [*places] != sorted(places):
            self._params = [self._params[i] for i in places]
            before = self._engine.residuals()
            self._engine.replace_buckets(())  # the new ones take their memory
            self._engine.replace_buckets(self._build_buckets(self._params))
            self._engine.restore_residuals(before)
            self._engine.submit_preparation(self._step, self._engine.everybody).result()

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; collective, around the whole loop.

        A rank that leaves the context early stays until all have left. Steps average over the ranks
        that still have data. At the end all ranks get parameters, buffers, the optimizers' state
        and that of `also` from a rank that worked to the end. Name learning rate schedulers and a
        `GradScaler` in `also`: each rank's have counted as many steps as it had data for.

        Costs one small all-reduce per step. Inside of it only `average` works; other collective
        calls raise `UsageError`. So does ``join()`` inside another one, or for an algorithm that
        cannot go on without a rank.
        """
        if self._world.joined is not None:
            raise UsageError(
                "join() inside join(): one model of a world can be joined at a time, around its"
                " loop"
            )
        self._engine.require_any_members()
        check_stateful(also, "join()")
        self._world.agree("join", also=", ".join(type(owner).__name__ for owner in also))
        self._world.joined = self
        try:
            yield
            self._outlast(also)
        finally:
            self._world.joined = None
            self._engine.forget()
            self._members = self._engine.everybody

    def _outlast(self, also: Sequence[Stateful]) -> None:
        """Take part in steps until nobody has data, then the state of one of the last."""
        last = self._members
        while members := self._engine.submit_has_data(False, self._step).result():
            last = members
            self._step += 1
        self._copies.find()  # an optimizer may make them in its first step
        overwrite_model(self._world, self.model, self._step, last[0])
        overwrite_states(
            self._world, [*self._optimizers, *also, *self._copies.owners()], self._step, last[0]
        )
        self._guard.restart(also)
        self._riding.read()
        wish = self._riding.known_to_stop or (self._world.rank,) * self._riding.wants_stop
        # also of steps in which this rank had no data
        asked = gather_integers(self._world, wish[0] if wish else -1, self._step)
        self._riding.known_to_stop = tuple(sorted({*asked.values()} - {-1}))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides; with feedback each rank saves its own."""
        state = super().state_dict()
        quantizer = self._engine.quantizer
        if quantizer is None:
            return state
        order = [name for name, _ in self._params] if self._order_is_observed else None
        ours = {"order": order, "norm": quantizer.norm, "rank": self._world.rank}
        return (
            state
            | ours
            | {"residuals": {name: part.clone() for name, part in self._engine.residuals().items()}}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; see `Replica.load_state_dict`."""
        residuals = own_residuals(state, self._world.rank, self._engine.residuals())
        super().load_state_dict(state)
        self._riding.drop()
        if self._engine.quantizer is not None:
            self._restore_order(state.get("order"))
            self._engine.restore_residuals(residuals)
            self._engine.quantizer.resume(state.get("norm"))

    def _restore_order(self, names: Sequence[str] | None) -> None:
        """Let the same values share scales as before, if the parameters have the same names."""
        place = {name: i for i, (name, _) in enumerate(self._params)}
        order = [place[name] for name in names or () if name in place]
        if (
            self._world.all_equal("the order of gradients", str(order))
            and len(order) == len(place)
            and not self._alone
        ):
            self._reorder(order)

    def consolidate(self) -> None:
        """See `Replica.consolidate`; averaged replicas are equal already, but for buffers."""
        if self._engine.mixes:
            super().consolidate()
        else:
            self.sync_buffers()
            self._compare_replicas()

    def why_not_graphs(self) -> dict[int, str]:
        """Return why buckets were not carried by a graph; see `Replica.why_not_graphs`."""
        return {} if self._engine.graphs is None else dict(self._engine.graphs.reasons)

    def detach(self) -> None:
        """Remove every hook, and free the buckets; see `Replica.detach`."""
        super().detach()
        self._engine.release()
