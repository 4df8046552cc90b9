# SPDX-License-Identifier: Apache-2.0
"""Runs schedules on other tensors than buckets, such as a model's buffers in each step.

It writes those tensors only. See `TensorExchange` for threads.
"""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from commrt.algorithms import tree
from commrt.buckets.span import Span
from commrt.program import member_program
from commrt.runtime.executor import BoundProgram, bind, cut
from commrt.runtime.generation import Members
from commrt.runtime.prepared import Prepared
from commrt.runtime.reading import bind_reading
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.protocol import Tag, Window

KEPT = 16
"""Schedules, members and tensors whose bound programs are kept."""


class TensorExchange:
    """Runs schedules of commrt's own on rows of values, each bound when it is new.

    `share`, and what is called ``..._now``, run on the communication thread, or in place of it.
    `forget` and `release` are for a moment with nothing in flight.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._prepared = Prepared[BoundProgram](world, KEPT)
        # one that peers of this host read
        self._shared: tuple[Tensor, Window] | None = None

    def share(self, tensor: Tensor) -> None:
        """Let peers of this host read `tensor`, which is broadcast in each step, where they can.

        Collective.
        """
        windows = self._world.transport.share([tensor])
        self._shared = (tensor, windows[0]) if windows else None

    def forget(self) -> None:
        """Forget what was bound; see `Engine.forget`."""
        self._prepared.forget()

    def release(self) -> None:
        """Let go of all memory."""
        self._prepared.forget()
        self._shared = None

    def broadcast_now(self, flat: Tensor, step: int, members: Members) -> Span:
        """Overwrite `flat` with the first member's."""
        begin_s = perf_counter()
        schedule = tree.broadcast(len(members))
        nbytes_sent = self.run_now(schedule, flat, members, Tag(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)

    def run_now(self, schedule: Schedule, tensor: Tensor, members: Members, tag: Tag) -> int:
        """Run `schedule` on a tensor that travels in each step, and return the bytes sent."""
        bound = self._prepared.known(schedule, members, tensor)
        if bound is None:
            bound = self._bind(schedule, members, tensor)
            self._prepared.keep(bound, schedule, members, tensor)
        bound.run(tag, self._world.comm_thread.listener)
        return bound.nbytes_sent

    def _bind(self, schedule: Schedule, members: Members, tensor: Tensor) -> BoundProgram:
        """Return the program of this rank on `tensor`, a row."""
        world = self._world
        mine = member_program(schedule, members, world.rank, world.size)
        if self._shared is not None and tensor is self._shared[0]:
            return bind_reading(mine, tensor, self._shared[1], world.transport)
        return bind(mine, tensor, world.transport, bounds=cut(schedule, tensor))
