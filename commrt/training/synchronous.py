# SPDX-License-Identifier: Apache-2.0
"""Synchronous training: a replica, its step in the backward pass, and its checkpoints and `join`.

Hooks of gradients begin and end a step on the thread that runs the backward pass, for which the
thread that trains waits in ``backward()``, if it is not the same. Any thread may read `waits_for`;
all else runs on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, cast

from torch.utils.hooks import RemovableHandle

from commrt.buckets.averaging import AveragingEngine
from commrt.buckets.digest import Digest
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.span import Span
from commrt.buckets.view_bucket import ViewBucket
from commrt.buckets.weight_watch import WeightWatch
from commrt.errors import UsageError
from commrt.runtime.generation import Members
from commrt.runtime.wire import is_quantized
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, within_range
from commrt.training.backward_pass import INTERRUPTED, PassEnd, current_pass
from commrt.training.bucket_order import BucketOrder
from commrt.training.buffer_broadcast import BufferBroadcast
from commrt.training.gathering import gather_integers
from commrt.training.gradient_hooks import on_counted_gradients, on_dense_gradients
from commrt.training.joining import joining
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.training.residuals import own_residuals
from commrt.training.riding import NOBODY
from commrt.training.riding_rules import rules_of_averages
from commrt.training.stateful import Stateful
from commrt.training.step_guard import StepGuard
from commrt.training.step_report import StepReport
from commrt.training.synchronous_join import outlast, require_any_members, submit_data_vote

TWICE = (
    "the gradient of {name} became ready twice in one backward pass. Reentrant activation"
    " checkpointing does that: use checkpoint(..., use_reentrant=False)"
)
LATE = -2
"""In place of a pass's number: the step runs in an optimizer's, on a rank without gradients.

Not -1, which is what `current_pass` returns outside of a pass: `_average` compares with it.
"""
BY_HAND = -3
"""In place of a pass's number: the step runs in `Replica.average`."""


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


class SynchronousReplica(Replica):
    """Has the averages in ``param.grad`` when ``backward()`` returns.

    They are the same on all ranks, which so stay bitwise equal, but where the algorithm mixes
    (`Engine.mixes`): gossip of gradients averages those of partners.

    A step is `_begin` at the first gradient of a backward pass, `_submit` for each bucket that is
    complete, and `_finish` at the end of the pass, which waits. The communication thread averages a
    bucket (`Engine.reduce_now`): `GradientBucket.pack` scales it, `BoundProgram.run` sends and
    adds, `GradientBucket.unpack` writes ``param.grad``. After an error in between the step never
    ends: this rank has sent only a part of what the others wait for.

    Between steps `join` lets ranks run out of data (`synchronous_join`), and a checkpoint holds
    what rounding lost. Of the fields of `Replica` it writes `last`, `_stats` and `_step`. Written
    here of others: `Engine.own_weight` at the begin of a step, which the communication thread reads
    in it, and `StepGuard.held_back` in passes of `no_sync`.
    """

    def __init__(
        self, request: Request, engine: AveragingEngine, *, broadcast_buffers: bool
    ) -> None:
        named = [named for bucket in engine.buckets for named in bucket.params]
        rules = rules_of_averages(
            request.algorithm, engine.buckets, mixes=engine.mixes, same_bits=request.same_bits
        )
        watches = request.watch and request.world.size > 1
        watched = Digest([*request.model.parameters()]) if watches else None
        super().__init__(request, named, rules, watched)
        self._request = request
        self._engine = engine
        params = [param for _, param in named]
        self._guard = StepGuard(
            self._optimizers, params, partial(self._average, LATE), request.scales
        )
        self._alone = self._world.size == 1
        views = [bucket for bucket in engine.buckets if isinstance(bucket, ViewBucket)]
        # gradients move to the wire as they become ready
        self._moves_in = any(bucket.moves_in for bucket in views) and not self._alone
        self._ready = engine.order  # counts the gradients of one pass
        self._bucket_order = BucketOrder(engine, request.build_buckets, named)
        self._buffers: BufferBroadcast | None = None
        if broadcast_buffers and not self._alone:
            self._buffers = BufferBroadcast(self.model, engine)
        self._running: int | None = None
        """The step that runs: its backward pass's number, `LATE` or `BY_HAND`; None between."""
        self._header = engine.buckets[0].header
        """What all ranks must agree on in this step; the first bucket says it."""
        self._looked: Future[None] | None = None
        """With ``watch=True``: done once the weights' digest is taken, for the first bucket."""
        self._has_data: Future[Members] | None = None
        """In ``join()``: which ranks still have data, and so are members of the running step."""
        self._members = engine.everybody
        """Those of the latest step."""
        self._in_flight: list[Future[Span]] = []
        """What the running step waits for: a bucket each, and the buffers."""
        self._live(self._gradient_hooks(), self._guard.before_step, self._guard.after_step)

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """The buckets, in the order in which they leave."""
        return self._engine.buckets

    @property
    def waits_for(self) -> int | None:
        """The bucket, by index, for which ``backward()`` waits now; for any thread to read."""
        if self._running is None or not self._ready.all_left:
            return None
        in_flight = self._in_flight
        # the last one may run on the thread that trains, and is there when it is done
        return next((i for i, each in enumerate(in_flight) if not each.done()), len(in_flight))

    def _gradient_hooks(self) -> Iterator[RemovableHandle]:
        """Count gradients; those that live on the wire may move there one by one."""
        if self._moves_in:
            return on_dense_gradients(self, self._params, SynchronousReplica._on_gradient)
        full = SynchronousReplica._on_full_bucket
        other = SynchronousReplica._on_gradient
        return on_counted_gradients(self, self._params, self._ready, full, other)

    def _on_gradient(self, name: str) -> None:
        """Count a gradient that is the first of its pass, or moves to the wire."""
        number = current_pass()
        if not self._is_synchronous:
            self._guard.held_back = True
            self._weights.count_pass(number)
            return
        if self._running != number:
            self._begin_pass(number, f"the gradient of {name}")
        elif name in self._ready.not_awaited:
            raise UsageError(TWICE.format(name=name))
        leaving = self._ready.mark(name)
        if self._moves_in and self._world.joined is None:  # there, only `_has_data` tells the scale
            bucket = self._engine.buckets[self._ready.not_awaited[name]]
            cast("ViewBucket", bucket).move_in(name, self._engine.scale(self._world.size))
        if leaving:
            self._submit(leaving)

    def _begin_pass(self, number: int, what: str) -> None:
        """Begin the step of backward pass `number`, and let the end of that pass finish it."""
        if not self._weights.is_idle:
            self._weights.count_pass(number)  # or refuse it, before the step begins
        self._begin(number, what)
        PassEnd(self._finish, self._ready.disarm)
        self._ready.arm()  # last: what fails before leaves no gradient awaited

    def _on_full_bucket(self) -> None:
        """Let the buckets leave that are full and whose turn it is."""
        if (number := current_pass()) != self._running:  # an error interrupted the pass before
            self._begin_pass(number, "a gradient")
        self._submit(self._ready.full())

    def _holds_means(self) -> bool:
        # of several, each may have its own passes
        return len(self._optimizers) == 1 and self._guard.is_due

    def average(self) -> None:
        """Average the gradients at hand now; see `Replica.average`."""
        if self._is_synchronous:
            self._average(BY_HAND)

    def _average(self, number: int) -> None:
        """Run a whole step, `LATE` or `BY_HAND`; nothing inside of a pass, which runs its own."""
        if self._running != current_pass():
            self._weights.forget_thrown_away()
            self._begin(number, "average()")
            self._ready.arm()
            try:
                self._finish()
            finally:
                self._ready.disarm()

    def _begin(self, number: int, what: str) -> None:
        """Start the step `number`; refuse `what` begins it while another step runs."""
        if self._running is not None and not self._alone and not self._world.closed:
            raise UsageError(INTERRUPTED.format(what=what))
        if self._world.joined not in (None, self):
            raise UsageError(
                "another model of this world is in join(): ranks that left it answer for that model"
                " only"
            )
        self._parameters.require_unchanged()
        self._running = number
        self._in_flight = []
        weights = self._weights
        self._engine.own_weight = 1.0 if weights.is_idle else weights.own_weight
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
            None if self._world.joined is None else submit_data_vote(self._world, True, self._step)
        )

    def _submit(self, indices: Iterable[int], *, waits: bool = False) -> None:
        """Let the buckets `indices` leave; the caller `waits` for the answers next, or not yet."""
        for i in indices:
            bucket = self._engine.buckets[i]
            header = self._header if i == 0 else bucket.header
            backward = None if self._running in (LATE, BY_HAND) else self._running
            leaving = None
            if bucket.riders is not None:
                leaving = self._riding.leave_with_gradients(backward, is_mixed=self._engine.mixes)
            if not self._alone:
                bucket.take(header, self._ready.not_awaited, leaving)
            else:
                bucket.take_alone(leaving)
            answer = self._engine.submit(bucket, self._step, self._has_data, waits=waits)
            self._in_flight.append(answer)

    def _finish(self) -> None:
        """Send what is left, wait until all averages are in ``param.grad``, and end the step.

        In this order: send, wait, write, report; then prepare the next step, with nothing in
        flight; last let optimizers step. What raises before `_running` is None leaves the step
        begun, which refuses all later ones.
        """
        begin_s = perf_counter()
        self._submit(self._ready.rest(), waits=True)
        if self._buffers is not None:  # only now, as a backward pass may change them
            self._in_flight += self._buffers.submit(self._step, self._has_data)
        # before the buckets: if one of these two failed, the others only know that something did
        if self._has_data is not None:
            self._members = self._has_data.result()
        if self._looked is not None:
            self._looked.result()
        listener = self._world.comm_thread.listener
        with NOTHING if listener is None else within_range(listener, "wait", step=self._step):
            spans = tuple(map(Future.result, self._in_flight))
        # from here on nothing is in flight, and gradients and buffers may be written
        if not self._alone:
            for bucket in self._engine.buckets:
                bucket.assign_missing()
        if self._buffers is not None and not self._buffers.is_empty:
            self._buffers.install()
        first = self._engine.buckets[0]
        self._riding.arrive(first.riders)
        if (
            first.weight is not None
            # else ranks know of different weights, and the unit is equal on all
            and self._world.joined is None
            and not self._engine.mixes
        ):
            self._weights.use_unit(first.weight / self._world.size)
        # the step has ended, and is reported
        self.last = StepReport(self._step, self._members, perf_counter() - begin_s, spans)
        self._stats = self._stats.plus(self.last)
        self._running = None
        self._step += 1
        self._world.latest_collective = ""
        # for the next one
        if not self._bucket_order.is_final and self._world.joined is None:
            self._riding.keep()  # from memory that other buckets may take
            self._bucket_order.observe(self._step)
        if self._engine.graphs is not None:  # of the buckets of the next step
            self._engine.capture_graphs(self._engine.graphs, self._step)
        self._guard.open()  # last: no optimizer may use a step of which anything failed

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
        engine = self._engine
        require_any_members(engine)
        with joining(self._world, self, also):
            try:
                yield
                self._step = outlast(self._request, also, self._step, self._members)
                self._guard.restart(also)
                # also of steps in which this rank had no data
                asked = gather_integers(self._world, self._riding.asker(), self._step)
                self._riding.hear_of_stop(sorted({*asked.values()} - {NOBODY}))
            finally:
                engine.forget()
                self._members = engine.everybody

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides; with feedback each rank saves its own."""
        state = super().state_dict()
        quantizer = self._engine.quantizer
        if quantizer is None:
            return state
        return state | {
            "order": self._bucket_order.names(),
            "norm": quantizer.norm,
            "rank": self._world.rank,
            "residuals": {name: part.clone() for name, part in self._engine.residuals().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; see `Replica.load_state_dict`."""
        residuals = own_residuals(state, self._world.rank, self._engine.residuals())
        super().load_state_dict(state)
        self._riding.drop()
        if self._engine.quantizer is not None:
            self._bucket_order.restore(state.get("order"), self._step)
            self._engine.restore_residuals(residuals)
            self._engine.quantizer.resume(state.get("norm"))

    def consolidate(self) -> None:
        """See `Replica.consolidate`; averaged replicas are equal already, but for buffers."""
        if self._engine.mixes:
            super().consolidate()
        else:
            with self._world.collective("consolidate()"):
                self.sync_buffers()
                self._compare_replicas()

    def why_not_graphs(self) -> dict[int, str]:
        """Return why buckets were not carried by a graph; see `Replica.why_not_graphs`."""
        return {} if self._engine.graphs is None else dict(self._engine.graphs.reasons)

    def detach(self) -> None:
        """Remove every hook, and free the buckets; see `Replica.detach`."""
        super().detach()
        self._engine.release()
