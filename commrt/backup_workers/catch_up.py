# SPDX-License-Identifier: Apache-2.0
"""A late rank takes the whole state of a rank that counted, from a server in each rank.

The state is weights, buffers and optimizer states, all of one version. Between the begin of a
forward pass and the optimizer's step only buffers change. So another rank may copy the state while
this one computes; only the optimizer's step waits until the copy is done. In collectives, and after
its last step, a rank gives its weights as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from threading import Event

from torch.distributed import Store

from commrt.backup_workers.replica_state import ReplicaState, StateTransfer, unpack
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.state_server import StateServer, request_state
from commrt.errors import DeadlineExceeded, Place, QuorumLost
from commrt.runtime.world import World
from commrt.store.client import TimedStore
from commrt.store.launcher import LOOPBACK
from commrt.threads.deadline import Deadline, Timeouts
from commrt.training.riding import Riding

PASS_SHARE = 1 / 3
"""For this share of the time of a probe a source, a rank that is asked for its state, lets a late
rank wait until it comes to its next forward pass.
"""
AGAIN_S = 0.01
"""Between two rounds of questions."""


class CatchUp:
    """Fetch the state of other ranks for this one, and answer their questions for this rank's
    `state`.

    Used on the training thread, or that of its backward pass; `close` also on the one that closes
    the world. It writes on the store where to ask this rank. What it fetches, the caller uses. The
    server's threads answer, and set ``riding.wants_stop`` where a late rank asks to stop.
    """

    def __init__(
        self,
        world: World,
        membership: ElasticMembership,
        store: Store,
        state: ReplicaState,
        riding: Riding,
    ) -> None:
        self._world = world
        self._membership = membership
        self._riding = riding
        self._store = TimedStore(store, world.rank, lambda: world.timeout_s)
        towards = None if world.reconnect_options is None else world.reconnect_options.towards

        def give(number: int) -> Generator[bytes]:
            # a late rank has no gradients with which its wish to stop could ride
            version, asks_to_stop = divmod(number, 2)
            if asks_to_stop:
                riding.wants_stop = True
            return state.give(version, Timeouts.of(world.timeout_s).probe_s * PASS_SHARE)

        self._server = StateServer(towards or LOOPBACK, give)

    def close(self) -> None:
        """Answer no more questions."""
        self._server.close()

    def open(self) -> None:
        """Let other ranks ask this one."""
        self._store.set(f"service/{self._world.rank}", self._server.address)

    def fetch(self, version: int, sources: Sequence[int]) -> StateTransfer:
        """Return the state of `version`, or a later one, of the first of `sources` that can give
        it; waits for one.

        Raises `QuorumLost` if all sources are gone, `DeadlineExceeded` if none has the state in
        time.
        """
        limits = Timeouts.of(self._world.timeout_s)
        limit = Deadline(limits.collective_s, limits.probe_s + limits.step_s)
        while True:
            connected = self._membership.generation.connected
            for rank in sources:
                address = self._store.read(f"service/{rank}") if rank in connected else b""
                number = 2 * version + self._riding.wants_stop  # as `give` reads it
                # A rank that has said yes may take long to copy its state, or be stopped: at first
                # little is waited for, then as long as this rank has waited already.
                copy_s = min(max(limits.probe_s, limit.waited_s), limits.step_s)
                if (
                    address
                    and (packed := request_state(address, number, limits.probe_s, copy_s))
                    is not None
                ):
                    return unpack(packed)
                if limit.left_s <= 0:
                    break
            self._require_sources(version, sources, is_late=limit.left_s <= 0)
            Event().wait(AGAIN_S)

    def _require_sources(self, version: int, sources: Sequence[int], *, is_late: bool) -> None:
        membership = self._membership
        membership.require_open()
        members = membership.generation.members
        place = Place(self._world.rank, peer=sources[0], step=version)
        gone = {rank for rank in sources if rank not in members} | membership.member.gone(sources)
        # it is or was a member
        if (is_late or len(gone) == len(sources)) and self._world.config is None:
            membership.member.current()  # raises Evicted if the others went on without this rank
        if len(gone) == len(sources):
            raise QuorumLost(
                f"only ranks {sources} had the weights of step {version}, and they are gone: start"
                " again from a checkpoint",
                place,
            )
        if is_late:
            raise DeadlineExceeded(
                f"this rank was late and needs the weights of one of ranks {sources}, but within"
                f" {self._world.timeout_s:g} s none of them came to its next forward pass or a"
                " collective, or closed its world, or what they sent did not arrive: look at their"
                " output, and at this host's network",
                place,
            )
