# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of data at different times, where gradients are averaged in each step.

They vote who has data, and who has none does what is left. Collective, on the thread that trains,
inside `Replica.join`. Overwrites the model and the states of optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt.buckets.averaging import AveragingEngine
from commrt.buckets.flag_vote import ranks_with_flag_now
from commrt.errors import UsageError
from commrt.runtime.generation import Members
from commrt.runtime.world import World
from commrt.threads.future import Future
from commrt.training.model_collectives import overwrite_model, overwrite_states
from commrt.training.request import Request
from commrt.training.stateful import Stateful
from commrt.transport.protocol import Tag


def require_any_members(engine: AveragingEngine) -> None:
    """Raise `UsageError` if the algorithm cannot go on when a rank leaves."""
    if engine.same_bits:
        raise UsageError(
            "join() with same_bits=True: a rank that leaves changes every sum; attach without"
            " same_bits"
        )
    try:
        for members in range(2, engine.world.size + 1):  # one alone runs none
            engine.algorithm.schedule(0, members)
    except UsageError as error:
        raise UsageError(
            f"{engine.algorithm} cannot go on without a rank that has left join(): {error}"
        ) from error


def submit_data_vote(world: World, has_data: bool, step: int) -> Future[Members]:
    """Ask all ranks who still has data: the members of the step, none if nobody has."""
    tag = Tag(step, "has data")
    return world.comm_thread.submit(lambda: ranks_with_flag_now(world, has_data, tag))


def outlast(
    request: Request,
    also: Sequence[Stateful],
    step: int,
    members: Members,
) -> int:
    """Say in each step from `step` on that this rank has no data, until no rank has any.

    Then overwrite the model, and the states of optimizers and `also`, with those of a rank that had
    data last: one of `members`, who made the step before, if nobody has any now. Returns the number
    of the next step.
    """
    while found := submit_data_vote(request.world, False, step).result():
        members = found
        step += 1
    source = members[0]
    request.copies.find()  # an optimizer may make them in its first step
    overwrite_model(request.world, request.model, step, source)
    owners = [*request.optimizers, *also, *request.copies.owners()]
    overwrite_states(request.world, owners, step, source)
    return step
