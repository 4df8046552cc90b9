# SPDX-License-Identifier: Apache-2.0
"""Adds up buckets of gradients over the members of a step, and leaves the sums on the wires.

Gradients themselves it leaves alone. `Engine` says which thread calls what, and what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from time import perf_counter
from typing import cast

from torch import Tensor

from commrt import proof
from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import schedule_of
from commrt.buckets.binding import Binding
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.greeting import greet_peers_now
from commrt.buckets.ready_order import ReadyOrder
from commrt.buckets.riders import Riders
from commrt.buckets.span import Span
from commrt.buckets.step_graph import BoundStep
from commrt.buckets.tensor_exchange import TensorExchange
from commrt.buckets.weight_watch import WeightWatch
from commrt.errors import TransportClosed
from commrt.proof.spec import promise
from commrt.proof.summing import require_short_sums
from commrt.runtime.executor import RunnableProgram
from commrt.runtime.generation import Members
from commrt.runtime.prepared import Prepared
from commrt.runtime.remade_schedules import RemadeSchedules
from commrt.runtime.wire import QuantizedWire
from commrt.runtime.wire_carrier import StepQuantizer, carrier_of
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, Fact, Recorder, within_range
from commrt.transport.protocol import Tag

KEPT = 16
"""Schedules and members whose bound programs are kept."""
PROVEN_KEPT = 256
"""Schedules that count as proven."""


class Engine:
    """The buckets of a model, and what adds them up.

    What a schedule *object* does among some members is proven and bound once, and then only run.

    Threads: methods called ``..._now`` run on the communication thread, or in place of it, and so
    do the private ones, but for `_prove` and `_let_go`. Any may call `require_proven`, `schedule`,
    `is_current` and `scale`. All else is for the thread that trains, or that of its backward pass,
    with nothing in flight; backup workers replace buckets on the communication thread, while the
    other one waits.

    What it writes of others: of its buckets the wires, residuals, riders, `weight` and `factor`.
    `AveragingEngine`, the only subclass, uses private parts, as it says.
    """

    unpacks = False
    """True if averages end in the gradients, so that parts of them may stay in peers' memory."""
    algorithm: Algorithm
    """Whose schedules run; `use_algorithm` sets it, and `mixes`."""
    mixes: bool
    """Ranks do not become equal, as each averages with some others only."""
    buckets: Sequence[GradientBucket]
    """What is carried; `replace_buckets` sets it."""
    quantizer: StepQuantizer | None
    """Chooses the quantizer of each step; None if values travel as they are. `forget` makes it
    anew, `reduce_now` uses it, and a checkpoint reads and sets its norm between steps.
    """

    def __init__(
        self, world: World, algorithm: Algorithm, buckets: Sequence[GradientBucket]
    ) -> None:
        """`use_algorithm` and `replace_buckets` set what is not set here."""
        self.world = world
        self.require_proven = lru_cache(PROVEN_KEPT)(self._prove)
        """Raises unless a schedule does what it must; sees each once."""
        self._remade = RemadeSchedules()
        self.own_weight = 1.0
        """What this rank's gradients weigh in a mean over ranks; set when a step begins, on the
        thread that trains or that of its backward pass.
        """
        # by what the weights that ride with a step's first bucket change the scale of later ones
        self._factor = 1.0
        self.order = ReadyOrder()
        """In which the buckets leave; for callers whose gradients become ready one by one."""
        self.tensors = TensorExchange(world)
        """Runs schedules on other tensors that travel in each step."""
        self._prepared = Prepared[BoundStep](world, KEPT)
        self.use_algorithm(algorithm)
        self.replace_buckets(buckets)

    def use_algorithm(self, algorithm: Algorithm) -> None:
        """Run the schedules of `algorithm` from now on."""
        self.algorithm = algorithm
        # if it mixes: over rows of how many ranks it has averaged before
        self._row: int | None = getattr(algorithm, "mixing_row", None)
        self.mixes = self._row is not None
        # each bucket asks, and an algorithm may make it anew each time
        self._round_of = lru_cache(1)(self._find_round)

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the proven schedule of training step `step` for so many `ranks`."""
        schedule = schedule_of(self.algorithm, step, ranks)
        self.require_proven(schedule)
        return schedule

    def _prove(self, schedule: Schedule) -> None:
        proof.prove(schedule, promise(self.algorithm, schedule))
        if self.buckets and (wire := self.buckets[0].quantized) is not None:
            require_short_sums(schedule, wire)
        tells = self.world.rank == self.world.members[0]
        self._remade.see(schedule, self.algorithm, tells=tells)

    def _find_round(self, step: int, members: Members) -> tuple[Schedule, Members]:
        """Return the schedule of `step`, and who plays it: of one that mixes and only renames the
        ranks of another, that other, so that few schedules are proven.
        """
        schedule = self.algorithm.schedule(step, len(members))
        if not self.mixes or schedule.renames is None:
            return schedule, members
        renamed, order = schedule.renames
        return renamed, tuple([members[rank] for rank in order.tolist()])

    def replace_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Carry `buckets` from now on; nothing may be in flight."""
        self.buckets = buckets
        self._binding = Binding(self.world, buckets, unpacks=self.unpacks)
        self.order.use([bucket.names for bucket in buckets])
        self.forget()

    @property
    def is_current(self) -> bool:
        """False if a new generation of ranks needs other buckets: a broken peer may still read
        these.
        """
        return self._prepared.is_current

    def forget(self) -> None:
        """Forget earlier steps: ranks that took part in different ones would remember different
        things.
        """
        self._prepared.forget()
        self.tensors.forget()
        wire = self.buckets[0].quantized if self.buckets else None
        self.quantizer = None if wire is None else carrier_of(wire).step_quantizer(wire)

    def residuals(self) -> dict[str, Tensor]:
        """Return what rounding lost of each parameter, for the next step;
        empty without feedback.
        """
        return {name: part for bucket in self.buckets for name, part in bucket.residuals().items()}

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Begin with `residuals`, and with zeros where they have nothing."""
        for name, part in self.residuals().items():
            part.copy_(residuals.get(name, part.new_zeros(())))

    def release(self) -> None:
        """Let go of all memory, behind what is in flight."""
        with suppress(TransportClosed):  # it was closed by another thread meanwhile
            if not self.world.closed:
                behind = self.world.comm_thread.run(lambda: None)
                behind.add_done_callback(lambda _: self._let_go())  # if it failed, too
                return
        self._let_go()

    def _let_go(self) -> None:
        self.replace_buckets(())
        self.require_proven.cache_clear()
        self._proven_last = None
        self.tensors.release()

    def submit_preparation(self, step: int, members: Members) -> Future[None]:
        """Bind and connect what `step` needs if all `members` take part, so that no step waits for
        it.
        """

        def prepare() -> None:
            if len(members) == 1:
                return
            self.schedule(step, len(members))
            if len(members) == self.world.size:
                self._binding.let_peers_read()
            schedule, players = self._round_of(step, members)
            quantizer = None if self.quantizer is None else self.quantizer.choose(step)
            self._prepare(schedule, players, quantizer, step)
            device = self.buckets[0].wire.device
            greet_peers_now(self.world, schedule, players, device, step)

        return self.world.comm_thread.submit(prepare)

    def reduce_now(self, bucket: GradientBucket, step: int, members: Members) -> Span:
        """Pack `bucket`, and add it up over `members`, of which this rank is one."""
        begin_s = perf_counter()
        if bucket.riders is not None:
            self._factor = 1.0
        if (count := len(members)) == 1:
            self._keep_own(bucket)
            return Span(bucket.index, begin_s, perf_counter(), 0)
        share = 1 / (self._row or count)
        schedule, players = self._round_of(step, members)
        quantizer = None if self.quantizer is None else self.quantizer.choose(step)
        listener = self.world.comm_thread.listener
        facts: dict[str, Fact] = {"number": bucket.index, "step": step, "algorithm": schedule.name}
        with NOTHING if listener is None else within_range(listener, "bucket", **facts):
            bound = self._prepared.known(schedule, players, quantizer)
            if bound is None:
                bound = self._prepare(schedule, players, quantizer, step)
            self._carry(bucket, bound, players, share, Tag(step, bucket.index), listener)
        own = bound.programs[bucket.index]
        return Span(bucket.index, begin_s, perf_counter(), own.nbytes_sent)

    def _prepare(
        self, schedule: Schedule, members: Members, quantizer: QuantizedWire | None, step: int
    ) -> BoundStep:
        """Prove `schedule`, which is new, and bind it to the buckets; `step` is for errors."""
        self.require_proven(schedule)
        bound = self._binding.bind(schedule, members, quantizer)
        return self._prepared.keep(bound, schedule, members, quantizer)

    def _carry(
        self,
        bucket: GradientBucket,
        bound: BoundStep,
        members: Members,
        share: float,
        tag: Tag,
        listener: Recorder | None,
    ) -> None:
        """Pack `bucket`, and run the program that is `bound` to it; `share` is that of each rank in
        the mean.
        """
        own = bound.programs[bucket.index]
        scale = self.own_weight * share
        with NOTHING if listener is None else within_range(listener, "pack"):
            bucket.pack(scale if self.mixes else scale * self._factor)
        own.run(tag, listener)
        if bucket.riders is not None:
            if bucket.riders.is_loaded or bucket.riders.digest is not None:
                self._use_riders(bucket, members, share, own, tag)
        elif self.mixes:  # the partner sums for another mean
            bucket.factor = self._factor
        if self.quantizer is not None:
            self.quantizer.note(bucket.wire[bucket.head_numel :])

    def _keep_own(self, bucket: GradientBucket) -> None:
        """Do what `reduce_now` does for a rank that is alone."""
        bucket.pack(self.scale(1) * self._factor)
        if bucket.riders is not None:
            bucket.weigh(1.0)
            self._factor = bucket.factor

    def _use_riders(
        self,
        bucket: GradientBucket,
        members: Members,
        share: float,
        own: RunnableProgram,
        tag: Tag,
    ) -> None:
        """Let weights that ride decide on the scale of the sum and of later buckets, and compare
        digests that ride. A sum that left the range of fp16 is sent once more.
        """
        riders = cast("Riders", bucket.riders)
        if riders.digest is not None:
            watch = cast("WeightWatch", bucket.watch)
            watch.end(tag.step, members)
            # a GPU would be waited for; compared in the next step
            if not bucket.wire.is_cuda and bucket.matches():
                watch.compare()
        bucket.weigh(share * riders.find_scale() if self.mixes else share)
        self._factor = bucket.factor
        if self._factor != 1 and bucket.must_pack_anew():
            bucket.factor = 1.0
            own.finish(tag)  # or a peer may still read the wire
            bucket.pack(self.own_weight * share * self._factor)
            own.run(tag, self.world.comm_thread.listener)

    def scale(self, ranks: int) -> float:
        """Return by what this rank's gradients are multiplied where they are sent to so many."""
        return self.own_weight * (1 / (self._row or ranks))
