# SPDX-License-Identifier: Apache-2.0
"""What synchronous training sends in a step: averages of gradients, call by call or by graphs.

And buffers, from the first member to all. Also where ranks mix (gossip of gradients), so that
averages differ between them. It writes what `Engine` writes, gradients, and buffers.
`AveragingEngine` says which thread calls what.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from torch import Tensor

from commrt import proof
from commrt.algorithm import Algorithm
from commrt.buckets.engine import Engine
from commrt.buckets.flag_vote import ranks_with_flag_now
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.greeting import greet_peers_now
from commrt.buckets.span import Span
from commrt.buckets.step_graph import BoundStep, StepGraphs
from commrt.runtime.comparison import Claim
from commrt.runtime.generation import Members
from commrt.runtime.wire import QuantizedWire
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, Fact, Recorder, within_range
from commrt.transport.protocol import Tag


class AveragingEngine(Engine):
    """An engine whose averages end in the gradients, and whose ranks compare new schedules.

    Public methods are for the thread that trains or its backward pass, private ones for the
    communication thread, or what runs in its place, as in `Engine`. What is called ``submit...``
    hands work to that thread and returns at once. On a CPU `submit` for a caller that `waits`, and
    `submit_broadcast`, do the work at once themselves, unless other work is on its way.

    Replaces of its parent, beside `forget`: `_prove`, which `require_proven` calls on any thread,
    `_prepare`, `_carry` and `_keep_own`, which `reduce_now` calls. There it uses `_prepared`, and
    `_factor`, which `_keep_own` writes.
    """

    unpacks = True
    graphs: StepGraphs | None
    """What replays steps; None if nothing does. `forget` makes it anew."""

    def __init__(
        self,
        world: World,
        algorithm: Algorithm,
        buckets: Sequence[GradientBucket],
        *,
        graphs: bool = False,
        same_bits: bool = False,
    ) -> None:
        """With `same_bits` all schedules must add in one order."""
        self.everybody: Members = tuple(range(world.size))
        """All ranks, which are the members of a step outside of ``join()``."""
        self.same_bits = same_bits
        # before the engine's constructor, which calls `forget`
        self._uses_graphs = graphs
        super().__init__(world, algorithm, buckets)

    def _prove(self, schedule: Schedule) -> None:
        super()._prove(schedule)
        if self.same_bits:
            proof.require_one_order(schedule)

    def forget(self) -> None:
        """See `Engine.forget`."""
        super().forget()
        self.graphs = StepGraphs(self.buckets, self.world.transport) if self._uses_graphs else None

    def submit(
        self,
        bucket: GradientBucket,
        step: int,
        vote: Future[Members] | None = None,
        *,
        waits: bool = False,
    ) -> Future[Span]:
        """Average `bucket` over all ranks, or those of a `vote` that is on its way; its gradients
        must not change until the answer is there.

        If the caller `waits` for it at once, its own thread does it on a CPU, unless others are on
        their way.
        """
        comm_thread = self.world.comm_thread
        begin = comm_thread.run if waits and not comm_thread.streams.queues else comm_thread.submit
        listener = comm_thread.listener
        facts: dict[str, Fact] = {"number": bucket.index, "step": step}
        with NOTHING if listener is None else within_range(listener, "submit", **facts):
            if vote is None:
                return begin(partial(self.reduce_now, bucket, step, self.everybody))
            return begin(lambda: self.reduce_now(bucket, step, vote.result()))

    def submit_broadcast(
        self, flat: Tensor, step: int, vote: Future[Members] | None = None
    ) -> Future[Span]:
        """Overwrite `flat` with the first member's; see `submit` for the `vote`, and for who does
        it, as the caller waits.
        """
        comm_thread = self.world.comm_thread
        begin = comm_thread.run if not comm_thread.streams.queues else comm_thread.submit
        if vote is None:
            return begin(partial(self.tensors.broadcast_now, flat, step, self.everybody))
        return begin(lambda: self.tensors.broadcast_now(flat, step, vote.result()))

    def let_peers_read(self, flat: Tensor) -> None:
        """Let peers of this host read `flat`, which is broadcast in each step, where they can;
        collective, and waits.
        """
        self.world.comm_thread.submit(lambda: self.tensors.share(flat)).result()

    def capture_graphs(self, graphs: StepGraphs, step: int) -> None:
        """Let devices capture the step before `step` by this engine's `graphs`, if it is time for
        that, and wait; between steps, with nothing in flight.
        """
        if graphs.is_due:
            agree = partial(ranks_with_flag_now, self.world, tag=Tag(step, "graphs"))
            self.world.comm_thread.submit(lambda: graphs.capture(agree)).result()

    @cached_property
    def _attached(self) -> str:
        """The digest that ranks compared in `attach`, of the schedule of step 0; computed here when
        it is first needed, as a schedule only depends on the step and the ranks.
        """
        return self.schedule(0, self.world.size).digest()

    def _prepare(
        self, schedule: Schedule, members: Members, quantizer: QuantizedWire | None, step: int
    ) -> BoundStep:
        """See `Engine._prepare`; before that the members compare the schedule, as no header says
        it.

        Gossip's schedules follow from what ranks compared in `attach`.
        """
        self.require_proven(schedule)
        if not self.mixes:
            claim = Claim(members, schedule.digest())
            if claim != (self.everybody, self._attached):
                self._prepared.compare_once(claim, partial(self._compare, schedule, step))
        return super()._prepare(schedule, members, quantizer, step)

    def _compare(self, schedule: Schedule, step: int, claim: Claim) -> None:
        """Raise `DisagreementError` if members run different schedules; connect those that run the
        same one.
        """
        self.world.consistency.require_same_schedule_now(claim.text, claim.ranks, step)
        device = self.buckets[0].wire.device
        greet_peers_now(self.world, schedule, claim.ranks, device, step)

    def _carry(
        self,
        bucket: GradientBucket,
        bound: BoundStep,
        members: Members,
        share: float,
        tag: Tag,
        listener: Recorder | None,
    ) -> None:
        """See `Engine._carry`; also unpacks the average. A device graph may do it all."""
        if self.graphs is not None and self._replay(self.graphs, bucket, bound, tag):
            return
        super()._carry(bucket, bound, members, share, tag, listener)
        own = bound.programs[bucket.index]
        with NOTHING if listener is None else within_range(listener, "unpack"):
            bucket.unpack(own.peer_parts)
        own.finish(tag)

    def _replay(
        self, graphs: StepGraphs, bucket: GradientBucket, bound: BoundStep, tag: Tag
    ) -> bool:
        """Return True if a device graph did all the work; never in ``join()``, where ranks see
        different steps.
        """
        with self.world.comm_thread.within_range("graph"):
            riders = bucket.riders
            has_news = riders is not None and (riders.is_loaded or riders.digest is not None)
            if self.world.joined is not None or self._factor != 1 or has_news:
                return False
            return graphs.carry(bucket, bound, self.scale(self.world.size), tag)

    def _keep_own(self, bucket: GradientBucket) -> None:
        """See `Engine._keep_own`; the gradients do not travel."""
        if bucket.riders is not None:
            bucket.riders.write_alone()
            bucket.weigh(1.0)
            self._factor = bucket.factor
        if (times := self.own_weight * self._factor) != 1:
            bucket.multiply(times)
