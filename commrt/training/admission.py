# SPDX-License-Identifier: Apache-2.0
"""How a process becomes a member of ranks that train, or leaves them again.

On the thread that trains. Of others it writes `World.config`; if the process is not let in, it
departs from the membership and detaches the replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.runtime.world import World
from commrt.training.replica import Replica


@contextmanager
def letting_in(replica: Replica, world: World, membership: ElasticMembership) -> Iterator[None]:
    """Become a member of `world` in the body; if that fails, tell the others and detach.

    Once it is a member, `World.config` is None, as on any other rank.
    """
    try:
        yield
    except BaseException as error:
        membership.depart(f"it was not let in: {error}")
        replica.detach()
        raise
    world.config = None
