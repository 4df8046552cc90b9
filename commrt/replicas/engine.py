# SPDX-License-Identifier: Apache-2.0
"""Carries buckets: pack, run the schedule, unpack, in order, on the world's lane."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import perf_counter

import torch
from torch import Tensor

from commrt.algorithms import halving_doubling
from commrt.algorithms.gossip import Gossip
from commrt.collective import Collective, all_reduce
from commrt.errors import UsageError
from commrt.program import Program, among, program
from commrt.proving.mixing import promise
from commrt.proving.proof import prove
from commrt.recording import within_range
from commrt.replicas.repeating import Repetition
from commrt.replicas.report import Span
from commrt.runtime.executor import BoundProgram, bind, scratch_numel
from commrt.runtime.world import World
from commrt.schedule import Algorithm, Schedule
from commrt.threads.answer import Answer, Pending
from commrt.transport.protocol import Group, Moment, Parcel
from commrt.wire.buckets import Bucket, Named

__all__ = ["Cut", "Engine"]

KEPT = 16
"""Proofs and bound programs that are kept, of the schedules and members used last."""
COMPARISONS_KEPT = 256
"""Of the schedules and members used last; a digest and a few numbers each."""


Cut = Callable[[Sequence[Named]], list[Bucket]]
"""Makes buckets of parameters, given in the order in which gradients become ready."""
Bound = Callable[[Schedule, tuple[int, ...]], list[BoundProgram]]
"""The programs of all buckets, for a schedule and who takes part."""


class Engine:
    """Averages buckets over the members of a step; everything here runs on the lane, in order of submission.

    The latest programs are kept per schedule *object* and members: an algorithm that returns the same object for the
    same answer is proven and bound once.
    """

    def __init__(
        self,
        world: World,
        algorithm: Algorithm,
        buckets: Sequence[Bucket],
        *,
        graphs: bool = False,
        players: int | None = None,
    ) -> None:
        self.world = world
        self._players = world.size if players is None else players  # of a step, when all goes well
        self._graphs = graphs
        self.algorithm = algorithm
        self.members = tuple(range(world.size))
        """Who takes part in the step; changes only by a roll call."""
        self._gossips = isinstance(algorithm, Gossip)
        self._proven = lru_cache(KEPT)(self._prove)
        self._digest = lru_cache(KEPT)(Schedule.digest)
        self.replace_buckets(buckets)

    def schedule(self, step: int) -> Schedule:
        """What training step `step` runs when as many take part as should; proven."""
        schedule = self.algorithm.schedule(step, self._players)
        if not isinstance(schedule, Schedule) or schedule.ranks != self._players:
            raise UsageError(
                f"{self.algorithm} made {schedule!r:.80} for {self._players} ranks: no schedule of as many"
            )
        return self._proven(schedule)

    def _prove(self, schedule: Schedule) -> Schedule:
        prove(schedule, self._promise(schedule))
        return schedule

    def _promise(self, schedule: Schedule) -> Collective:
        if isinstance(self.algorithm, Gossip):
            return promise(self.algorithm, schedule)
        return all_reduce(schedule.ranks, schedule.chunks)

    def _scale(self) -> float:
        """By which a rank's gradients count in what the schedule adds."""
        return 1 / (self.algorithm.within if isinstance(self.algorithm, Gossip) else len(self.members))

    def require_any_members(self) -> None:
        """Raise `UsageError` if the algorithm cannot go on when a rank leaves."""
        try:
            for members in range(2, self.world.size + 1):  # one alone runs none
                self.algorithm.schedule(0, members)
        except UsageError as error:
            raise UsageError(f"{self.algorithm} cannot go on without a rank that has left join(): {error}") from error

    def replace_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Carry `buckets` from now on; what is in flight keeps what it needs."""
        self.buckets = buckets
        self.forget()

    def forget(self) -> None:
        """What was kept of the latest steps: ranks that took part in different ones would keep different things."""
        self._compared: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()
        self._repetition = Repetition(self.buckets, self.world.transport) if self._graphs else None
        self._bound = lru_cache(KEPT)(partial(_bind, self.world, self.buckets, {}))

    def release(self) -> None:
        """Let go of all memory once nothing is in flight; nothing more can be carried."""
        self.replace_buckets(())
        self._proven.cache_clear()

    def submit_preparation(self, step: int) -> Answer[None]:
        """Compile and allocate what `step` needs if everybody takes part, so that no step waits for it."""
        return self.world.lane.submit(lambda: self._prepare(step))

    def submit(self, bucket: Bucket, step: int) -> Answer[Span]:
        """Average `bucket` over the members; its gradients must not change until the answer is there."""
        bound = self._bound
        return self.world.lane.submit(lambda: self._carry(bucket, step, bound))

    def submit_broadcast(self, flat: Tensor, step: int) -> Pending[Span]:
        """Overwrite `flat` with the first member's."""
        return self.world.lane.submit(lambda: self.broadcast_now(flat, step))

    def submit_roll_call(self, present: bool, step: int) -> Answer[None]:
        """Ask all ranks who still has data; the answer is `members` from here on (empty if nobody)."""
        return self.world.lane.submit(lambda: self._call_roll(present, step))

    def _prepare(self, step: int) -> None:
        if self.world.size > 1:
            schedule = self.schedule(step)
            self._bound(schedule, tuple(range(self.world.size)))
            self._greet(program(schedule, self.world.rank), step)

    def _greet(self, mine: Program, step: int) -> None:
        """Send to everybody who is sent to: NCCL connects two ranks when they first meet (NVIDIA/nccl#1487)."""
        device = self.buckets[0].wire.device
        others = (
            {leg.peer for hop in mine.hops for leg in hop.sends},
            {leg.peer for hop in mine.hops for leg in hop.recvs},
        )
        sends, recvs = ([Parcel(peer, torch.zeros(1, device=device)) for peer in sorted(side)] for side in others)
        self.world.transport.bind(Group(sends, recvs))(Moment(step, "greeting"))

    def _carry(self, bucket: Bucket, step: int, bound: Bound) -> Span:
        begin_s = perf_counter()
        if len(self.members) == 1:
            return Span(bucket.index, begin_s, begin_s, 0)
        schedule = self.algorithm.schedule(step, len(self.members))
        with within_range(self.world.recorder, "bucket", number=bucket.index, step=step, algorithm=schedule.name):
            self._compare_once(schedule, step)
            programs = bound(self._proven(schedule), self.members)
            if not self._repeat(bucket, programs, step):
                self._carry_by_calls(bucket, programs[bucket.index], step)
        return Span(bucket.index, begin_s, perf_counter(), programs[bucket.index].nbytes_sent)

    def gather_now(self, bucket: Bucket, step: int) -> Span:
        """Add up `bucket` over `members`, and leave the sum on the wire for `Bucket.unpack`; on the lane."""
        begin_s = perf_counter()
        schedule, recorder = self.algorithm.schedule(step, len(self.members)), self.world.recorder
        own = self._bound(self._proven(schedule), self.members)[bucket.index]
        with within_range(recorder, "bucket", number=bucket.index, step=step, algorithm=schedule.name):
            with within_range(recorder, "pack"):
                bucket.pack(self._scale())
            own.run(Moment(step, bucket.index), recorder)
        return Span(bucket.index, begin_s, perf_counter(), own.nbytes_sent)

    def _repeat(self, bucket: Bucket, programs: Sequence[BoundProgram], step: int) -> bool:
        """True if the device knew what to do."""
        if self._repetition is None or self.world.joined is not None:  # there not all ranks see the same steps
            return False
        with within_range(self.world.recorder, "graph"):
            return self._repetition.carry(bucket, programs, self._scale(), Moment(step, bucket.index))

    def _carry_by_calls(self, bucket: Bucket, own: BoundProgram, step: int) -> None:
        recorder = self.world.recorder
        with within_range(recorder, "pack"):
            bucket.pack(self._scale())
        own.run(Moment(step, bucket.index), recorder)
        with within_range(recorder, "unpack"):
            bucket.unpack()

    def why_not_graphs(self) -> dict[int, str]:
        """The buckets that were not carried by a graph in the latest step outside of ``join()``, and why."""
        return {} if self._repetition is None else dict(self._repetition.reasons)

    def remember(self, step: int) -> None:
        """Between steps, with nothing in flight: let devices remember what `step` did, if it is time for that."""
        repetition = self._repetition
        if repetition is not None and repetition.is_due:
            moment = Moment(step, "graphs")
            task = partial(repetition.remember, lambda refused: self._who(refused, self.members, moment))
            self.world.lane.submit(task).result()

    def _compare_once(self, schedule: Schedule, step: int) -> None:
        """Raise `DisagreementError` if members run different schedules.

        Remembered by what moves and who takes part, never by object: all members must find the same comparisons due.
        """
        if self._gossips:  # another schedule in each step, which follows from what was compared when it was attached
            return
        key = self._digest(schedule), self.members
        if key not in self._compared and key != self._attached():
            self.world.require_same_now(*key, step)
            self._greet(among(schedule, self.members, self.world.rank, self.world.size), step)
        self._compared[key] = None
        self._compared.move_to_end(key)
        if len(self._compared) > COMPARISONS_KEPT:
            self._compared.popitem(last=False)

    def _attached(self) -> tuple[str, tuple[int, ...]]:
        """What all ranks compared before the first step."""
        return self._digest(self.schedule(0)), tuple(range(self.world.size))

    def broadcast_now(self, flat: Tensor, step: int) -> Span:
        """Overwrite `flat` with the first member's; on the lane."""
        begin_s = perf_counter()
        nbytes_sent = self.world.broadcast_now(flat, self.members, Moment(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)

    def _call_roll(self, present: bool, step: int) -> None:
        self.members = self._who(present, tuple(range(self.world.size)), Moment(step, "roll call"))

    def _who(self, mine: bool, asked: tuple[int, ...], moment: Moment) -> tuple[int, ...]:
        """Those `asked` who say yes."""
        flags = torch.zeros(self.world.size, device="cpu")
        flags[self.world.rank] = float(mine)
        schedule = halving_doubling.all_reduce(len(asked))
        self.world.run_now(schedule, flags, moment, asked)
        return tuple(flags.nonzero().flatten().tolist())


def _bind(
    world: World,
    buckets: Sequence[Bucket],
    scratch: dict[torch.dtype, Tensor],
    schedule: Schedule,
    members: tuple[int, ...],
) -> list[BoundProgram]:
    """Bind the schedule to every bucket; `scratch` is shared, since buckets travel one at a time."""
    mine = among(schedule, members, world.rank, world.size)
    for wire in (bucket.wire for bucket in buckets):
        need = scratch_numel(mine, wire.numel())
        if wire.dtype not in scratch or scratch[wire.dtype].numel() < need:
            scratch[wire.dtype] = world.transport.allocate(need, wire.dtype, wire.device)
    transport, streams = world.transport, world.lane.streams
    return [bind(mine, bucket.wire, transport, scratch[bucket.wire.dtype], streams) for bucket in buckets]
