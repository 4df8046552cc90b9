# SPDX-License-Identifier: Apache-2.0
"""What every `Replica.join` begins and ends with: one model of a world at a time, on all ranks.

Collective, on the thread that trains. It writes `World.joined`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from commrt.errors import UsageError
from commrt.runtime.world import World
from commrt.training.stateful import Stateful, check_stateful


@contextmanager
def joining(
    world: World, replica: object, also: Sequence[Stateful], **claims: str
) -> Iterator[None]:
    """Let `replica` be in ``join()`` in the body, so that `world` refuses other collective calls.

    Raises `UsageError` inside another ``join()``, or if an object in `also` has no state;
    `DisagreementError` if ranks come with other kinds in `also`, or with different `claims`.
    """
    if world.joined is not None:
        raise UsageError(
            "join() inside join(): one model of a world can be joined at a time, around its loop"
        )
    check_stateful(also)
    world.agree("join", also=", ".join(type(owner).__name__ for owner in also), **claims)
    world.joined = replica
    try:
        yield
    finally:
        world.joined = None
