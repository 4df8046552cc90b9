# SPDX-License-Identifier: Apache-2.0
"""How a process that comes to ranks that train takes one's state, and how that one gives it.

The rank that gives packs its state at the end of a backward pass, or where it waits for others to
merge (`GrowingReplica`). So it never waits for one that comes; a thread of the server hands the
state out. It writes keys of its own on the store, and no state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress

from torch.distributed import PrefixStore

from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.state_server import StateServer, request_state
from commrt.runtime.world import World
from commrt.store.client import TimedStore
from commrt.store.keys import store_of_model
from commrt.store.launcher import LOOPBACK
from commrt.threads.deadline import Timeouts
from commrt.threads.future import Future

PASS_SHARE = 1 / 4
"""A source is asked for this share of a step's limit: so long may a backward pass take to end."""


class StateGiver:
    """Gives the state of one rank to processes that come.

    A thread of the server per process that comes runs `_give`. `answer` runs on the thread that
    trains, or the one that ends its backward pass; all else is the training thread's.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._store = _addresses(world, number)
        self._asked: deque[Future[bytes]] = deque()
        """Those that wait: threads of the server append them, and remove them if nothing comes in
        time; `answer` takes them.
        """
        towards = None if world.reconnect_options is None else world.reconnect_options.towards
        self._server = StateServer(towards or LOOPBACK, self._give)

    def open(self) -> None:
        """Let processes that come ask this rank."""
        self._store.set(f"service/{self._world.rank}", self._server.address)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()

    def _give(self, _: int) -> Generator[bytes]:
        asked = Future[bytes]()
        self._asked.append(asked)
        try:
            packed = asked.result(_ready_s(self._world))
        except TimeoutError:
            with suppress(ValueError):  # `answer` has taken it
                self._asked.remove(asked)
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
        with suppress(IndexError):  # nobody waits any more
            while True:
                self._asked.popleft().set_result(packed)


def fetch_state(world: World, number: int, membership: ElasticMembership) -> bytes | None:
    """Return what a member gives of the `number`-th model, None if none does so now.

    Members are asked in turn, and the k-th rank asks another one first than the others. Waits on
    the thread that calls it.
    """
    own = world.rank
    places = world.size
    limits = Timeouts.of(world.timeout_s)
    addresses = _addresses(world, number)
    for rank in sorted(membership.generation.connected, key=lambda rank: (rank - own) % places):
        address = addresses.read(f"service/{rank}")
        if (
            address
            and (packed := request_state(address, 0, _ready_s(world), limits.step_s)) is not None
        ):
            return packed
    return None


def _addresses(world: World, number: int) -> TimedStore:
    """Return the store of the servers' addresses for the `number`-th model."""
    store = PrefixStore("given", store_of_model(world.store, number))
    return TimedStore(store, world.rank, lambda: world.timeout_s)


def _ready_s(world: World) -> float:
    return Timeouts.of(world.timeout_s).step_s * PASS_SHARE
