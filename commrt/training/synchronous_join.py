# SPDX-License-Identifier: Apache-2.0
"""What a rank does that runs out of data before others, where gradients are averaged in each step.

Collective, on the thread that trains, inside `Replica.join`. Overwrites the model and the states of
optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt.buckets.averaging import AveragingEngine
from commrt.runtime.generation import Members
from commrt.training.model_collectives import overwrite_model, overwrite_states
from commrt.training.request import Request
from commrt.training.stateful import Stateful


def outlast(
    request: Request,
    engine: AveragingEngine,
    also: Sequence[Stateful],
    step: int,
    members: Members,
) -> int:
    """Say in each step from `step` on that this rank has no data, until no rank has any.

    Then overwrite the model, and the states of optimizers and `also`, with those of a rank that had
    data last: one of `members`, who made the step before, if nobody has any now. Returns the number
    of the next step.
    """
    while found := engine.submit_has_data(False, step).result():
        members = found
        step += 1
    source = members[0]
    request.copies.find()  # an optimizer may make them in its first step
    overwrite_model(request.world, request.model, step, source)
    owners = [*request.optimizers, *also, *request.copies.owners()]
    overwrite_states(request.world, owners, step, source)
    return step
