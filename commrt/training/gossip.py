# SPDX-License-Identifier: Apache-2.0
"""Train by gossip: after each optimizer step the weights go to one partner while the next forward
pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from commrt.algorithms.gossip import Gossip
from commrt.buckets.engine import Span
from commrt.buckets.header import Header, explain_mismatch
from commrt.buckets.layout import exchanged_tensors, plan_buckets
from commrt.buckets.riders import NOTHING_LEAVES, SLOT, Leaving, Riders
from commrt.buckets.weight_bucket import Message, Received, WeightBucket
from commrt.elastic.elastic_membership import make_elastic
from commrt.elastic.generations import Generation
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.layout import HEADER_NUMEL
from commrt.program import Program, permuted_program
from commrt.proof.replay import prove
from commrt.proof.spec import promise
from commrt.runtime.executor import Scratch, bind
from commrt.runtime.membership import LOST
from commrt.runtime.reading import bind_reading, bind_receiving
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.training.after_step import AfterStepReplica
from commrt.training.hooks import ModuleHook
from commrt.training.replica import Replica
from commrt.training.request import Request
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag

KEPT = 1024
"""Orders of the ranks whose programs are kept: those used last."""
PROGRAMS_BOUND = 64
"""Programs that all messages stay bound to: those used last."""


def attach(request: Request) -> Replica:
    """Return a replica that exchanges its weights with one partner after each step. Collective."""
    world = request.world
    algorithm = cast("Gossip", request.algorithm)
    exchange = GossipExchange(world, algorithm, world.attached)
    # else it was refused
    held = exchanged_tensors(request.model)
    wire = cast("torch.dtype | None", request.wire)
    messages = algorithm.staleness + 1
    allocate = world.transport.allocate_shared
    watches = bool(request.optimizers)
    plan = plan_buckets(
        ((slot.tensor().nbytes, slot.tensor().dtype) for slot in held), request.cap_nbytes
    )
    buckets = [
        WeightBucket(
            index,
            [held[i] for i in places],
            wire,
            messages,
            allocate,
            watches=watches,
            has_digests=request.watch,
        )
        for index, places in enumerate(plan)
    ]
    if algorithm.within > 1 and any(bucket.rounds for bucket in buckets):
        raise UsageError(
            "wire= with within=: the weights of a row are summed on the wire, so each step would"
            " round them to it; leave wire out"
        )
    return request.open(
        exchange.prove(),
        buckets,
        partial(GossipReplica, request, exchange, buckets),
        prepare=partial(exchange.share, buckets),
        come=GossipReplica.come if world.size > world.founders else None,
    )


class Stop(NamedTuple):
    """The wish of a rank that all stop after a step."""

    step: int
    asker: int

    def leaving(self) -> Leaving:
        """Return what tells others of it."""
        slot = np.zeros((), SLOT)
        slot["present"], slot["stop_at"], slot["asker"] = 1, *self
        return Leaving(slot)


NO_STOP = Stop(1 << 32, -1)


class GossipReplica(AfterStepReplica):
    """Train one replica by gossip; it stays close to the others, and waits for at most one of them
    at a time.

    At the end of a step parameters and running statistics are sent. Before a module next runs
    forward, what its partner sent is mixed into its parameters. If no optimizer steps, as under a
    `GradScaler` that met an infinity, the weights are sent before the forward pass.
    """

    def __init__(
        self, request: Request, exchange: GossipExchange, buckets: Sequence[WeightBucket]
    ) -> None:
        super().__init__(request, buckets)
        self._refuses = "weights travel there, and are not added up; use an all-reduce"
        self._stops = cast("Gossip", request.algorithm).within == 1
        self._asked = False
        self._stop = NO_STOP
        self._heard: Riders | None = None  # what came with the latest message of the first bucket
        self.buckets = buckets  # in the order in which they are sent
        self._exchange = exchange
        self._staleness = cast("Gossip", request.algorithm).staleness
        # buckets whose modules have called a forward hook since the last step
        self._hooked: set[int] = set()
        self._live_with([*self._register_on_modules(), *self._hooks()])

    def _restart_at_step(self, step: int) -> None:
        self.drain()
        self._exchange.membership.restart_at_step(step)
        super()._restart_at_step(step)

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"stop": [*self._stop]}

    def _follow(self, record: Mapping[str, Any]) -> None:
        super()._follow(record)
        self._stop = Stop(*map(int, record["stop"]))

    def _register_on_modules(self) -> Iterator[RemovableHandle]:
        modules: dict[int, tuple[nn.Module, set[int]]] = {}
        for bucket in self.buckets:
            for slot in bucket.held:
                modules.setdefault(id(slot.module), (slot.module, set()))[1].add(bucket.index)
        before_state = ModuleHook(lambda *_: self.drain())
        for module, indices in modules.values():
            mix = ModuleHook(partial(self._before_forward, sorted(indices)))
            # others compute weights: spectral_norm, prune
            yield module.register_forward_pre_hook(mix, prepend=True)
            yield module.register_load_state_dict_pre_hook(before_state)  # type: ignore[no-untyped-call]
        yield self.model.register_state_dict_pre_hook(before_state)  # type: ignore[no-untyped-call]

    def _before_forward(self, indices: Sequence[int], *_: Any) -> None:
        clock = self._clock
        if clock.passes > clock.step and torch.is_grad_enabled() and self.model.training:
            if not (clock.is_used or self._steps.running):
                for bucket in self.buckets:
                    if not bucket.in_flight:
                        bucket.require_unwritten(anyway=True)
            self._end_all_steps()  # an optimizer has not stepped
        self._hooked.update(indices)
        for index in indices:
            self._mix(self.buckets[index], self._staleness)

    def _advance(self) -> None:
        """Send the weights as they are now."""
        step = self._clock.step
        if self._world.size > 1:
            for bucket in self.buckets:
                self._mix(bucket, self._staleness)
            if self._spans:  # of the step before
                self._report(step - 1, self._exchange.members)
            for bucket in self.buckets:
                self._exchange.send(bucket, step, self._stop)
                bucket.note()
            for bucket in self.buckets:
                if bucket.index not in self._hooked:  # compiled modules call no hooks, for instance
                    self._mix(bucket, self._staleness)
            self._hooked.clear()
        self._clock.end_step()

    def _mix(self, bucket: WeightBucket, allowed: int) -> None:
        """Wait until at most `allowed` exchanges of `bucket` are in flight, and mix what the others
        brought.
        """
        while len(bucket.in_flight) > allowed:
            with self._waiting_for(bucket):
                self._heard = bucket.in_flight[0].heard if bucket.index == 0 else self._heard
                span, _, sources = bucket.mix(self._exchange.membership.outwait)
            self._spans.append(span)
            self._received_from.update(sources)

    def _on_pass(self) -> None:
        for bucket in self.buckets:
            if not bucket.in_flight:
                bucket.note(anyway=True)

    def stop(self) -> None:
        """See `Replica.stop`: ranks hear of it one by one, and all stop after the same,
        later step.
        """
        if not self._stops:
            raise UsageError(
                f"stop() with {self._algorithm}: messages of rows are added up; use within=1"
            )
        self._asked = True

    @property
    def stopping(self) -> tuple[int, ...]:
        """See `Replica.stopping`; read it in each step, as ranks pass on what they have read."""
        if self._heard is not None:
            (slot,), self._heard = self._heard.read(), None
            if slot["stop_at"]:
                self._stop = min(self._stop, Stop(int(slot["stop_at"]), int(slot["asker"])))
        if self._asked and self._stop == NO_STOP:
            self._stop = Stop(self._clock.passes + self._exchange.steps_to_all(), self._world.rank)
        return (self._stop.asker,) if self._clock.passes >= self._stop.step else ()

    def drain(self) -> None:
        """Wait for all exchanges in flight and mix what they brought; not collective."""
        self._end_all_steps()  # an optimizer has not stepped
        for bucket in self.buckets:
            self._mix(bucket, 0)
        if self._spans:
            self._report(self._clock.step - 1, self._exchange.members)

    def _take_from_first(self, *, buffers_only: bool = False) -> None:
        self.drain()
        super()._take_from_first(buffers_only=buffers_only)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer; each rank saves a model of
        its own.
        """
        self.drain()
        return super().state_dict()

    def detach(self) -> None:
        """See `Replica.detach`; drops exchanges that are in flight."""
        super().detach()
        for bucket in self.buckets:
            bucket.in_flight.clear()
        self._exchange.release()


class GossipExchange:
    """Exchange buckets with partners, in the order of submission.

    The exchanges of a period are proven when the ranks become known, and a step only gives each
    rank another's part.

    When a rank is lost, the others form a new generation. It starts at the latest step of all its
    members. A member that has not reached that step trains alone until then.
    """

    def __init__(self, world: World, algorithm: Gossip, number: int) -> None:
        self.world = world
        self._attached = algorithm
        self._number = number
        self.membership = make_elastic(world)
        self._generation = self._shared = -1
        self._program_at = lru_cache(1)(self._find_program)
        self._program = lru_cache(KEPT)(self._program_of)
        self._bound = lru_cache(PROGRAMS_BOUND)(lambda program: cache(partial(self._bind, program)))

    def prove(self) -> Schedule:
        """Prove the exchanges of a period, of which all later ones are permutations; return the
        first.

        Raises `UsageError` for an algorithm whose `schedule` says otherwise than what runs.
        """
        self._adopt(self.membership.generation)
        algorithm = self._algorithm
        ranks = len(self.members)
        first = algorithm.schedule(0, ranks)
        for step in range(len(self._rounds) + 1):  # the last one is of another permutation
            renamed = self._rounds[step % len(self._rounds)].over(algorithm.order(step, ranks))
            if renamed.digest() != algorithm.schedule(step, ranks).digest():
                raise UsageError(
                    f"{algorithm}: schedule({step}, {ranks}) is another than rounds() and order()"
                    " make: override all"
                )
        return first

    def _adopt(self, generation: Generation) -> None:
        self.release()  # it was bound to connections of another generation
        self._generation = generation.number
        self.members = generation.ranks
        self._ranks = np.array(self.members)
        ranks = len(self.members)
        self._algorithm = (
            self._attached.among(ranks) if ranks != self.world.founders else self._attached
        )
        self._rounds = self._algorithm.rounds(ranks)
        for schedule in self._rounds:
            prove(schedule, promise(self._algorithm, schedule))

    def share(self, buckets: Sequence[WeightBucket]) -> None:
        """Let partners of this host read the messages of `buckets`, where they can; collective.

        After a rank was lost the others allocate anew, and GPUs go on through NCCL.
        """
        if self.world.size == 1:
            return
        self._shared = self._generation
        messages = [message for bucket in buckets for message in bucket.free]
        buffers = [buffer for message in messages for buffer in (message.sent, message.received)]
        windows = self.world.comm_thread.submit(
            lambda: self.world.transport.share(buffers)
        ).result()
        for number, message in enumerate(messages):
            message.windows = windows[2 * number : 2 * number + 2]

    def steps_to_all(self) -> int:
        """Return after how many steps all ranks know what one passes on.

        In a whole period each rank that knows it tells all its partners. However the ranks are
        permuted, so many periods as a period has rounds reach everybody. What came is passed on in
        the next step but one, or later. Ranks may come to all places meanwhile, which costs some a
        mix: so twice as many steps where there are more.
        """
        places = self.world.size
        founders = self.world.founders
        rounds = (
            len(self._attached.among(places).rounds(places))
            if places > founders
            else len(self._rounds)
        )
        return (1 + (places > founders)) * rounds * (rounds + 3 + self._algorithm.staleness) + 1

    def send(self, bucket: WeightBucket, step: int, stop: Stop) -> None:
        """Exchange `bucket` as it is now with the partners of `step`, and pass on `stop`.

        On the training thread.
        """
        if bucket.index == 0:
            self.membership.submit_step(step)
        header = Header(0, self._number, 0, step, bucket.index, 0)
        message = bucket.packed(header, self.membership.memory_epoch, self.world.transport.allocate)
        message.step = step
        if message.said is not None and (stop != NO_STOP or message.said.is_loaded):
            message.said.load(NOTHING_LEAVES if stop == NO_STOP else stop.leaving())
        with self.world.comm_thread.within_range("submit", number=bucket.index, step=step):
            message.answer = self.world.comm_thread.submit(
                partial(self._carry, message, bucket.index, step)
            )
        bucket.in_flight.append(bucket.free.popleft())

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self._program_at.cache_clear()
        self._program.cache_clear()
        self._bound.cache_clear()
        self._scratch = Scratch()

    def _carry(self, message: Message, bucket: int, step: int) -> Received:
        begin_s = perf_counter()
        membership = self.membership
        nbytes_sent = 0
        share = 0.0
        sources = list[int]()
        with self.world.comm_thread.within_range(
            "bucket", number=bucket, step=step, algorithm="gossip"
        ):
            if bucket == 0:
                membership.start_no_earlier(step + 1)
            if (generation := membership.generation).start <= step:
                if generation.number != self._generation:
                    self._adopt(generation)
                program = self._program_at(step)
                try:
                    if program.hops:
                        nbytes_sent, share = self._exchange(program, message, Tag(step, bucket))
                    sources = [leg.peer for hop in program.hops for leg in hop.recvs]
                except LOST as failure:
                    membership.recover(failure)
        return Received(Span(bucket, begin_s, perf_counter(), nbytes_sent), share, sources)

    def _exchange(self, program: Program, message: Message, tag: Tag) -> tuple[int, float]:
        """Return the bytes sent, and the weight of what was received."""
        run, nbytes_sent, share = self._bound(program)(message)
        if message.said is not None:
            if message.digests is not None:
                message.said.watch(message.digests[0])
            if message.said.is_loaded or message.said.is_watched:
                message.said.write()
        run(tag)
        if message.received.is_cuda:
            self.world.transport.wait()  # before it mixes what may never have come
        self.membership.failures = 0
        ours = message.sent[:HEADER_NUMEL]
        theirs = message.received[:HEADER_NUMEL]
        if not torch.equal(ours != 0, theirs != 0):
            why = explain_mismatch(ours + theirs)
            raise DisagreementError(
                f"gossip: bucket {tag.bucket} does not match what the partner sent: {why}"
            )
        if message.digests is not None:
            said = cast("Riders", message.heard).read()["digest"][0]
            if int(said) != message.digests[1].now():
                peers = [leg.peer for hop in program.hops for leg in hop.recvs]
                raise DisagreementError(
                    f"watch: in step {tag.step} other weights came from rank {peers[0]} than it"
                    " sent: bits were flipped on the way; look at the network between these ranks,"
                    " and start again from a checkpoint"
                )
        return nbytes_sent, share

    def _find_program(self, step: int) -> Program:
        """Return this rank's program in `step`, which all buckets have."""
        order = self._algorithm.order(step, len(self.members))
        return self._program(self._rounds[step % len(self._rounds)], order.tobytes())

    def _program_of(self, schedule: Schedule, order: bytes) -> Program:
        members = self._ranks[np.frombuffer(order, np.int64)]
        return permuted_program(schedule, members, self.world.rank, self.world.size)

    def _bind(self, program: Program, message: Message) -> tuple[Exchange, int, float]:
        transport = self.world.transport
        within = self._algorithm.within
        windows = message.windows if self._generation == self._shared else ()
        if within == 1:  # received apart, as mixing on the wire would round to the wire's dtype
            (hop,) = program.hops
            sends = [P2PMessage(leg.peer, message.sent) for leg in hop.sends]
            recvs = [P2PMessage(leg.peer, message.received) for leg in hop.recvs]
            nbytes_sent = len(sends) * message.sent.nbytes
            group = P2PGroup(sends, recvs)
            exchange = (
                bind_receiving(group, windows[0], transport) if windows else transport.bind(group)
            )
            return exchange, nbytes_sent, hop.recvs[0].weight
        if windows:
            bound = bind_reading(
                program, message.received, windows[1], transport, scratch=self._scratch
            )
        else:
            bound = bind(
                program, message.received, transport, self._scratch, self.world.comm_thread.streams
            )

        def run(tag: Tag) -> None:
            torch.mul(message.sent, 1 / within, out=message.received)
            bound.run(tag, self.world.comm_thread.listener)

        return run, bound.nbytes_sent, 1.0
