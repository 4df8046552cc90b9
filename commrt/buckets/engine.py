# SPDX-License-Identifier: Apache-2.0
"""Average buckets of gradients on the communication thread: pack, run the schedule, unpack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from commrt import proof
from commrt.algorithms import halving_doubling, tree
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.riders import Riders
from commrt.buckets.step_graph import BoundStep, StepGraphs
from commrt.errors import TransportClosed, UsageError
from commrt.options import require_short_sums
from commrt.program import Program, member_program
from commrt.proof.spec import promise
from commrt.runtime.executor import BoundProgram, RunnableProgram, Scratch, bind, scratch_numel
from commrt.runtime.prepared import Claim, Members, Prepared, cut, schedule_of
from commrt.runtime.reading import bind_reading
from commrt.runtime.wire import QuantizedWire, ValuesOnWire, carrier_of
from commrt.runtime.world import World
from commrt.schedule import Algorithm, Schedule
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, Fact, Recorder, within_range
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag, Window

KEPT = 16
"""Schedules and members whose bound programs are kept: the latest."""


@dataclass(frozen=True, slots=True)
class Span:
    """The communication thread's work for one bucket, in seconds of ``time.perf_counter``."""

    bucket: int | str
    begin_s: float
    end_s: float
    nbytes_sent: int


class Engine:
    """Averages buckets over the members of a step, in order of submission.

    Methods called ``submit_...`` return at once, but for a caller that waits anyway. Those called
    ``..._now`` run on the communication thread, or in place of it. The others are for the thread
    that trains, with nothing in flight.

    What a schedule *object* does among some members is proven (with `same_bits`, to add in one
    order), compared with the other ranks and bound once, and then only run.
    """

    def __init__(
        self,
        world: World,
        algorithm: Algorithm,
        buckets: Sequence[GradientBucket],
        *,
        graphs: bool = False,
        unpacks: bool = False,
        same_bits: bool = False,
        ranks: int | None = None,
    ) -> None:
        """With `unpacks`, averages end in the gradients, and ranks compare new schedules; else
        callers see to both.
        """
        self.world = world
        # that take part in the step; in ``join()`` those that still have data
        self.members = tuple(range(world.size))
        # in a step without late or lost ranks
        self._usual_ranks = world.size if ranks is None else ranks
        self._uses_graphs = graphs
        self._unpacks = unpacks
        self._same_bits = same_bits
        self.use_algorithm(algorithm)
        self._prepared = Prepared(
            world,
            self._bind,
            prove=self._prove,
            claim=self._claim,
            compare=self._compare,
            kept=KEPT,
        )
        self.tensors = Prepared(world, self._bind_tensor, kept=KEPT)
        """What runs on other tensors than the buckets in each step, such as the broadcast of
        buffers.
        """
        self.own_weight = 1.0
        """What this rank's gradients weigh in a mean over ranks; set between steps."""
        # by what the weights that ride with a step's first bucket change the scale of later ones
        self._factor = 1.0
        # one of them that peers of this host read
        self._shared: tuple[Tensor, Window] | None = None
        self.replace_buckets(buckets)

    def use_algorithm(self, algorithm: Algorithm) -> None:
        """Run the schedules of `algorithm`."""
        self.algorithm = algorithm
        self._row: int | None = getattr(algorithm, "mixing_row", None)
        self.mixes = self._row is not None  # so that ranks do not become equal
        # each bucket asks, and an algorithm may make it anew each time
        self._round_of = lru_cache(1)(self._find_round)
        # the digest of the schedule of step 0, which ranks compare in `attach`
        self._first: str | None = None

    def schedule(self, step: int) -> Schedule:
        """Return the proven schedule of training step `step` for the usual number of ranks."""
        schedule = schedule_of(self.algorithm, step, self._usual_ranks)
        self._prepared.prove(schedule)
        return schedule

    def _prove(self, schedule: Schedule) -> None:
        proof.prove(schedule, promise(self.algorithm, schedule))
        if self._same_bits:
            proof.require_one_order(schedule)
        if self.buckets and (wire := self.buckets[0].quantized) is not None:
            require_short_sums(schedule, wire)

    def require_any_members(self) -> None:
        """Raise `UsageError` if the algorithm cannot go on when a rank leaves."""
        if self._same_bits:
            raise UsageError(
                "join() with same_bits=True: a rank that leaves changes every sum; attach without"
                " same_bits"
            )
        try:
            for members in range(2, self.world.size + 1):  # one alone runs none
                self.algorithm.schedule(0, members)
        except UsageError as error:
            raise UsageError(
                f"{self.algorithm} cannot go on without a rank that has left join(): {error}"
            ) from error

    def replace_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Carry `buckets` from now on; nothing may be in flight."""
        self.buckets = buckets
        # by bucket, where peers read it; filled on the communication thread
        self._windows: dict[int, Window] = {}
        self.forget()

    def forget(self) -> None:
        """Forget earlier steps: ranks that took part in different ones would remember different
        things.
        """
        self._prepared.forget()
        self.tensors.forget()
        self._scratch = Scratch(self.world.transport.allocate)
        self.graphs = StepGraphs(self.buckets, self.world.transport) if self._uses_graphs else None
        wire = self.buckets[0].quantized if self.buckets else None
        self.quantizer = None if wire is None else carrier_of(wire).step_quantizer(wire)
        """Chooses the quantizer of each step; None if values travel as they are."""

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
        self._prepared.prove.cache_clear()
        self._shared = None

    def submit_preparation(self, step: int) -> Future[None]:
        """Bind and connect what `step` needs if every rank takes part, so that no step waits for
        it.
        """

        def prepare() -> None:
            schedule = self.schedule(step)
            members = self.members
            if self._usual_ranks == self.world.size:
                self._share_buckets()
            if self.mixes:
                schedule, members = self._round_of(step, members)
            self._prepared.get(
                schedule, members, None if self.quantizer is None else self.quantizer.at(step), step
            )
            self._connect_peers(schedule, members, step)

        return self.world.comm_thread.submit(prepare if len(self.members) > 1 else lambda: None)

    def submit(self, bucket: GradientBucket, step: int, *, waits: bool = False) -> Future[Span]:
        """Average `bucket` over the members; its gradients must not change until the answer is
        there.

        If the caller `waits` for it at once, its own thread does it on a CPU, unless others are on
        their way.
        """
        comm_thread = self.world.comm_thread
        begin = comm_thread.run if waits and not comm_thread.streams.queues else comm_thread.submit
        with comm_thread.within_range("submit", number=bucket.index, step=step):
            return begin(partial(self.reduce_now, bucket, step))

    def submit_broadcast(self, flat: Tensor, step: int) -> Future[Span]:
        """Overwrite `flat` with the first member's; see `submit` for who does it, as the caller
        waits.
        """
        comm_thread = self.world.comm_thread
        begin = comm_thread.submit if comm_thread.streams.queues else comm_thread.run
        return begin(partial(self.broadcast_now, flat, step))

    def share(self, flat: Tensor) -> None:
        """Let peers of this host read `flat`, which is broadcast in each step, where they can;
        collective.
        """
        windows = self.world.comm_thread.submit(lambda: self.world.transport.share([flat])).result()
        self._shared = (flat, windows[0]) if windows else None

    def submit_has_data(self, present: bool, step: int) -> Future[None]:
        """Ask all ranks who still has data;
        they are `members` from then on (none if nobody has).
        """

        def ask() -> None:
            self.members = self._ranks_with_flag(
                present, tuple(range(self.world.size)), Tag(step, "has data")
            )

        return self.world.comm_thread.submit(ask)

    def _share_buckets(self) -> None:
        """Let GPUs of this host read the buckets, in place of messages: all ranks take part in
        every step.
        """
        shown = [bucket for bucket in self.buckets if bucket.quantized is None]
        windows = self.world.transport.share([bucket.wire for bucket in shown])
        self._windows = {
            bucket.index: window for bucket, window in zip(shown, windows, strict=False)
        }

    def _connect_peers(self, schedule: Schedule, members: Sequence[int], step: int) -> None:
        """Exchange one number with each peer: NCCL connects two ranks when they first meet
        (NVIDIA/nccl#1487).
        """
        mine = member_program(schedule, members, self.world.rank, self.world.size)
        device = self.buckets[0].wire.device

        def messages(peers: set[int]) -> list[P2PMessage]:
            return [P2PMessage(peer, torch.zeros(1, device=device)) for peer in sorted(peers)]

        sends = messages({transfer.peer for hop in mine.hops for transfer in hop.sends})
        recvs = messages({transfer.peer for hop in mine.hops for transfer in hop.recvs})
        self.world.transport.bind(P2PGroup(sends, recvs))(Tag(step, "greeting"))

    def reduce_now(self, bucket: GradientBucket, step: int) -> Span:
        """Pack `bucket`, add it up over `members`, and unpack the average,
        or leave it on the wire.
        """
        begin_s = perf_counter()
        comm_thread = self.world.comm_thread
        tag = Tag(step, bucket.index)
        if bucket.riders is not None:
            self._factor = 1.0
        if (count := len(members := self.members)) == 1:
            self._keep_own(bucket)
            return Span(bucket.index, begin_s, perf_counter(), 0)
        schedule, members = self._round_of(step, members)
        quantizer = None if self.quantizer is None else self.quantizer.at(step)
        listener = comm_thread.listener
        facts: dict[str, Fact] = {"number": bucket.index, "step": step, "algorithm": schedule.name}
        with NOTHING if listener is None else within_range(listener, "bucket", **facts):
            bound = self._prepared.get(schedule, members, quantizer, step)
            own = bound.programs[bucket.index]
            if self.graphs is None or not self._replay(self.graphs, bucket, bound, tag):
                self._carry(bucket, members, 1 / (self._row or count), own, tag, listener)
        return Span(bucket.index, begin_s, perf_counter(), own.nbytes_sent)

    def _carry(
        self,
        bucket: GradientBucket,
        members: Sequence[int],
        share: float,
        own: RunnableProgram,
        tag: Tag,
        listener: Recorder | None,
    ) -> None:
        """Pack `bucket`, run its `own` program and unpack it; `share` is that of each rank in the
        mean.
        """
        scale = self.own_weight * share
        with NOTHING if listener is None else within_range(listener, "pack"):
            bucket.pack(scale if self.mixes else scale * self._factor)
        own.run(tag, listener)
        if bucket.riders is not None:
            if bucket.riders.is_loaded or bucket.riders.is_watched:
                self._read_riders(bucket, members, own, tag)
        elif self.mixes:  # the partner sums for another mean
            bucket.factor = self._factor
        if self.quantizer is not None:
            self.quantizer.note(bucket.wire[bucket.head_numel :])
        if self._unpacks:
            with NOTHING if listener is None else within_range(listener, "unpack"):
                bucket.unpack(own.peer_parts)
            own.finish(tag)

    def _keep_own(self, bucket: GradientBucket) -> None:
        """Do what `reduce_now` does for a rank that is alone."""
        if not self._unpacks:
            bucket.pack(self.scale() * self._factor)
        if bucket.riders is not None:
            if self._unpacks:
                bucket.riders.write_alone()
            bucket.weigh(1.0)
            self._factor = bucket.factor
        if self._unpacks and (times := self.own_weight * self._factor) != 1:
            bucket.multiply(times)

    def _read_riders(
        self, bucket: GradientBucket, members: Sequence[int], own: RunnableProgram, tag: Tag
    ) -> None:
        """Let weights that ride decide on the scale of later buckets; compare what the ranks'
        weights were.
        """
        riders = cast("Riders", bucket.riders)
        share = self._share
        if riders.digest is not None:
            riders.compared = tag.step, members
            # a GPU would be waited for; compared in the next step
            if not bucket.wire.is_cuda and bucket.matches():
                riders.compare()
        if self.mixes:
            riders.share = 1.0
            riders.read()
        bucket.weigh(share if riders.share is None else share * riders.share)
        self._factor = bucket.factor
        if self._factor != 1 and bucket.must_pack_anew():
            bucket.factor = 1.0
            own.finish(tag)  # or a peer may still read the wire
            bucket.pack(self.scale() * self._factor)
            own.run(tag, self.world.comm_thread.listener)

    def _find_round(self, step: int, members: tuple[int, ...]) -> tuple[Schedule, tuple[int, ...]]:
        """Return the schedule of `step`, and who plays it; where ranks only change places, one that
        was proven.
        """
        schedule = self.algorithm.schedule(step, len(members))
        if not self.mixes or schedule.renames is None:
            return schedule, members
        before, order = schedule.renames
        return before, tuple(map(members.__getitem__, order.tolist()))

    @property
    def _share(self) -> float:
        """What part of what ranks send is in their mean."""
        return 1 / (self._row or len(self.members))

    def scale(self) -> float:
        """Return by what this rank's gradients are multiplied where they are sent."""
        return self.own_weight * self._share

    def _replay(
        self, graphs: StepGraphs, bucket: GradientBucket, bound: BoundStep, tag: Tag
    ) -> bool:
        """Return True if a device graph did all the work; never in ``join()``, where ranks see
        different steps.
        """
        with self.world.comm_thread.within_range("graph"):
            riders = bucket.riders
            has_news = riders is not None and (riders.is_loaded or riders.is_watched)
            plain = self.world.joined is None and self._factor == 1 and not has_news
            return plain and graphs.carry(bucket, bound, self.scale(), tag)

    def capture_graphs(self, graphs: StepGraphs, step: int) -> None:
        """Let devices capture the step before `step`, if it is time for that; between steps, with
        nothing in flight.
        """
        if graphs.is_due:
            tag = Tag(step, "graphs")
            self.world.comm_thread.submit(
                lambda: graphs.capture(
                    lambda refused: self._ranks_with_flag(refused, self.members, tag)
                )
            ).result()

    def _claim(self, schedule: Schedule, members: Members, _: object) -> Claim | None:
        """Return what members compare before they first run `schedule`; None where nobody has to.
        No header says it.

        Gossip's schedules follow from what ranks compared in `attach`, and `attach` compared the
        schedule of step 0.
        """
        if members is None or self.mixes or not self._unpacks:
            return None
        if self._first is None:
            self._first = self.schedule(0).digest()
        everybody = tuple(range(self.world.size))
        digest = schedule.digest()
        return None if (members, digest) == (everybody, self._first) else Claim(members, digest)

    def _compare(self, claim: Claim, schedule: Schedule, step: int) -> None:
        """Raise `DisagreementError` if members run different schedules; connect those that run the
        same one.
        """
        self.world.consistency.require_same_schedule_now(claim.text, claim.ranks, step)
        self._connect_peers(schedule, claim.ranks, step)

    def broadcast_now(self, flat: Tensor, step: int) -> Span:
        """Overwrite `flat` with the first member's."""
        begin_s = perf_counter()
        bound = self.tensors.get(tree.broadcast(len(self.members)), self.members, flat)
        bound.run(Tag(step, "state"), self.world.comm_thread.listener)
        return Span("state", begin_s, perf_counter(), bound.nbytes_sent)

    def _bind_tensor(self, schedule: Schedule, members: Members, tensor: Tensor) -> BoundProgram:
        mine = member_program(schedule, members or self.members, self.world.rank, self.world.size)
        if self._shared is not None and tensor is self._shared[0]:
            return bind_reading(mine, tensor, self._shared[1], self.world.transport)
        return bind(mine, tensor, self.world.transport, bounds=cut(schedule, tensor))

    def _ranks_with_flag(self, mine: bool, asked: tuple[int, ...], tag: Tag) -> tuple[int, ...]:
        flags = torch.zeros(self.world.size, device="cpu")
        flags[self.world.rank] = float(mine)
        self.world.run_now(halving_doubling.all_reduce(len(asked)), flags, tag, asked)
        return tuple(flags.nonzero().flatten().tolist())

    def _bind(
        self, schedule: Schedule, members: Members, quantizer: QuantizedWire | None
    ) -> BoundStep:
        mine = member_program(schedule, members or self.members, self.world.rank, self.world.size)
        if any(mine.peers & window.peers.keys() for window in self._windows.values()):
            return BoundStep([self._bind_reading(mine, bucket) for bucket in self.buckets])
        return BoundStep(self._bind_messages(mine, quantizer))

    def _bind_messages(
        self, mine: Program, quantizer: QuantizedWire | None
    ) -> Sequence[RunnableProgram]:
        transport = self.world.transport
        streams = self.world.comm_thread.streams
        heads = [
            bucket.wire[: bucket.head_numel] if bucket.quantized else bucket.wire
            for bucket in self.buckets
        ]
        both = [*zip(heads, [_cut(bucket, mine) for bucket in self.buckets], strict=True)]
        for wire, bounds in both:  # so that all share the largest
            self._scratch.row(scratch_numel(mine, wire.numel(), bounds), wire.dtype, wire.device)
        programs = [
            bind(mine, wire, transport, self._scratch, streams, bounds=bounds)
            for wire, bounds in both
        ]
        if quantizer is None:
            return programs
        values = [
            ValuesOnWire(head, bucket.wire[bucket.head_numel :], bucket.residual)
            for head, bucket in zip(programs, self.buckets, strict=True)
        ]
        device = values[0].values.device
        return carrier_of(quantizer).bind_values(
            mine,
            quantizer,
            values,
            transport,
            lambda _, nbytes: transport.allocate(nbytes, torch.uint8, device),
        )

    def _bind_reading(self, mine: Program, bucket: GradientBucket) -> BoundProgram:
        """Return the program in peers' memory, from which kernels unpack where they can."""
        window = self._windows[bucket.index]
        all_near = mine.peers <= window.peers.keys()
        straight = (
            bucket.repeatable is not None and self._unpacks and bucket.unpacks_wire and all_near
        )
        copied = bucket.head_numel if straight else None
        transport = self.world.transport
        bounds = _cut(bucket, mine)
        bound = bind_reading(
            mine,
            bucket.wire,
            window,
            transport,
            bounds=bounds,
            copied=copied,
            scratch=self._scratch,
        )
        if bucket.repeatable is not None and bound.peer_parts:
            bucket.repeatable.load(bound.peer_parts)  # before anything waits on the device
        return bound


def _cut(bucket: GradientBucket, mine: Program) -> Sequence[int] | None:
    """Return the bounds of the chunks of `bucket`: between tiles where kernels unpack, with windows
    or without.
    """
    return (
        None
        if bucket.repeatable is None or bucket.quantized is not None
        else bucket.repeatable.cut(mine.chunks)
    )
