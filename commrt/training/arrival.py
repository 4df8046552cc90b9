# SPDX-License-Identifier: Apache-2.0
"""How a process comes to ranks that train: it takes one's state, and later gives its own.

A rank packs its state at the end of a backward pass, on the thread that trains, and so never waits
for one that comes; a thread of the server hands it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.state_server import StateServer, request_state
from commrt.runtime.world import World
from commrt.store.client import TimedStore
from commrt.store.keys import store_of_model
from commrt.store.launcher import LOOPBACK
from commrt.threads.deadline import Timeouts
from commrt.threads.future import Future
from commrt.training.replica import Replica

PASS_SHARE = 1 / 4
"""A source is asked for this share of a step's limit: so long may a backward pass take to end."""


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


class StateGiver:
    """Gives the state of one rank to processes that come, and asks others for theirs.

    A thread of the server per process that comes runs `_give`; all else is the training thread's.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        store = PrefixStore("given", store_of_model(world.store, number))
        self._store = TimedStore(store, world.rank, lambda: world.timeout_s)
        self._asked: deque[Future[bytes]] = deque()
        """Those that wait: appended by threads of the server, taken by the training thread."""
        towards = None if world.reconnect_options is None else world.reconnect_options.towards
        self._server = StateServer(towards or LOOPBACK, self._give)

    def open(self) -> None:
        """Let processes that come ask this rank."""
        self._store.set(f"service/{self._world.rank}", self._server.address)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()

    @property
    def _ready_s(self) -> float:
        return Timeouts.of(self._world.timeout_s).step_s * PASS_SHARE

    def _give(self, _: int) -> Generator[bytes]:
        asked = Future[bytes]()
        self._asked.append(asked)
        try:
            packed = asked.result(self._ready_s)
        except TimeoutError:
            return
        yield b""
        yield packed

    @property
    def is_asked(self) -> bool:
        """True if somebody waits for this rank's state."""
        return bool(self._asked)

    def answer(self, pack: Callable[[], bytes]) -> None:
        """Give all that wait what `pack` returns, also those that come meanwhile."""
        packed = pack()
        while self._asked:
            self._asked.popleft().set_result(packed)

    def fetch(self, membership: ElasticMembership) -> bytes | None:
        """Return a member's state, None if none gives it now; the k-th rank asks another first."""
        own = self._world.rank
        places = self._world.size
        limits = Timeouts.of(self._world.timeout_s)
        for rank in sorted(membership.generation.connected, key=lambda rank: (rank - own) % places):
            address = self._store.read(f"service/{rank}")
            if (
                address
                and (packed := request_state(address, 0, self._ready_s, limits.step_s)) is not None
            ):
                return packed
        return None
