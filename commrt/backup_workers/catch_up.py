# SPDX-License-Identifier: Apache-2.0
"""Let a rank that was late in a step fetch the state of a rank that counted, from a server in each rank.

Each rank runs a small service; its address is on the store. So a late rank asks another one directly, and neither
disturbs the steps of the others.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from socket import gethostname
from threading import Event
from typing import NamedTuple

from torch.distributed import Store

from commrt.backup_workers.replica_state import ReplicaState, StateTransfer, unpack
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.liveness import Listener
from commrt.errors import DeadlineExceeded, PeerLost, Place, QuorumLost
from commrt.runtime.world import World
from commrt.store.client import TimedStore, parse, require
from commrt.threads.deadline import Deadline

__all__ = ["CatchUp", "FinalCalls", "PendingCatchUp", "StateServer", "request_state"]

_log = logging.getLogger("commrt")
READY_S, READY_SHARE = 3.0, 1 / 4
"""A source may take so long to say whether it has the state, and no more than this share of the timeout."""
STEP_SHARE = 1 / 3
"""For this share of that time a source waits until it comes to its next forward pass."""
ENDS_TRAINING = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, they do not answer, or the process that holds the store is gone."""
AGAIN_S = 0.01
"""Between two rounds of questions."""
PASSWORD_NBYTES = 16
REQUEST, NBYTES = struct.Struct(f"<{PASSWORD_NBYTES}sQ"), struct.Struct("<Q")
YES, NO = b"\1", b"\0"
PIECE_NBYTES = 1 << 20
LIMIT_S = 60.0
"""How long a client may be silent in the middle of a request."""
PASSWORD_S = 5.0
"""How long a client may be silent before it has sent the password."""
MAX_CLIENTS = 256
"""Clients at once; further ones are disconnected, and try again."""

Give = Callable[[int], Generator[bytes]]
"""Maps a number to nothing, which means no; or to nothing but a sign that there is an answer, and then the answer."""


class PendingCatchUp(NamedTuple):
    """The state that a late rank needs before it goes on."""

    version: int
    sources: tuple[int, ...]
    """The ranks that have it, in the order to ask them."""


class CatchUp:
    """Fetch the state of other ranks for this one, and answer their questions for this rank's `state`."""

    def __init__(self, world: World, membership: ElasticMembership, store: Store, state: ReplicaState) -> None:
        self._world, self._membership, self._state = world, membership, state
        self._store = TimedStore(store, world.rank, lambda: world.timeout_s)
        self._service = StateServer(self._membership.host or gethostname(), self._give)

    def open(self) -> None:
        """Let other ranks ask this one."""
        self._store.set(f"service/{self._world.rank}", self._service.address)

    def close(self) -> None:
        """Answer no more questions."""
        self._service.close()

    @property
    def _ready_s(self) -> float:
        return min(READY_S, self._world.timeout_s * READY_SHARE)

    def _give(self, version: int) -> Generator[bytes]:
        return self._state.give(version, self._ready_s * STEP_SHARE)

    def fetch(self, pending: PendingCatchUp) -> StateTransfer:
        """Return the state of the first source that can give it; waits for one.

        Raises `QuorumLost` if all sources are gone, `DeadlineExceeded` if none has the state in time.
        """
        limit = Deadline(self._world.timeout_s, self._ready_s + self._world.timeout_s / 2)
        while True:
            is_late, members = limit.left_s <= 0, self._membership.generation.members
            for rank in pending.sources:
                if rank in members and (answer := self._ask_source(rank, pending.version)) is not None:
                    return answer
            self._require_sources(pending, is_late=is_late)
            Event().wait(AGAIN_S)

    def _ask_source(self, rank: int, version: int) -> StateTransfer | None:
        """Return the state, or None if the rank does not have it; one that has it may take long to copy it."""
        if not (found := self._store.read(key := f"service/{rank}")):
            return None
        address = parse(key, found, bytes.decode)
        packed = request_state(address, version, self._ready_s, self._world.timeout_s / 2)
        return None if packed is None else unpack(packed)

    def _require_sources(self, pending: PendingCatchUp, *, is_late: bool) -> None:
        """Raise if all sources are gone, or the time is over."""
        membership, sources = self._membership, [*pending.sources]
        membership.require_open()
        members, place = membership.generation.members, Place(self._world.rank, sources[0], pending.version)
        gone = {rank for rank in sources if rank not in members or membership.on_store.is_gone(rank)}
        if (is_late or len(gone) == len(sources)) and self._world.config is None:  # it is or was a member
            membership.on_store.current()  # raises Evicted if the others went on without this rank
        if len(gone) == len(sources):
            raise QuorumLost(
                f"only ranks {sources} had the weights of step {pending.version}, and they are gone: start again from "
                "a checkpoint",
                place,
            )
        if is_late:
            raise DeadlineExceeded(
                f"this rank was late and needs the weights of one of ranks {sources}, but within "
                f"{self._world.timeout_s:g} s none of them came to its next forward pass or a collective, or closed "
                "its world: look at their output",
                place,
            )


class FinalCalls(list[Callable[[], object]]):
    """Calls to make once, before an error ends training."""

    def make(self, error: BaseException) -> None:
        """Make the calls if `error` ends training; logs what they raise."""
        if isinstance(error, ENDS_TRAINING) or isinstance(error.__cause__, ENDS_TRAINING):
            calls = [*self]
            self.clear()
            for call in calls:
                try:
                    call()
                except Exception:  # the other calls are made, and `error` is raised
                    _log.exception("commrt: a function given to before_giving_up() failed")


class StateServer(Listener):
    """Answers requests of processes that can reach the host `towards`; a thread per client calls `give`."""

    def __init__(self, towards: str, give: Give) -> None:
        self._give, self._password = give, secrets.token_bytes(PASSWORD_NBYTES)
        self._free_slots = threading.Semaphore(MAX_CLIENTS)
        super().__init__(towards, self._admit, "commrt-state-server")
        self.address += f" {self._password.hex()}"

    def _admit(self, client: socket.socket) -> None:
        """Serve the client on a thread, if there may be another."""
        if not self._free_slots.acquire(blocking=False):
            client.close()
            return
        try:
            threading.Thread(target=self._serve, args=(client,), daemon=True, name="commrt-state-server").start()
        except RuntimeError:  # the system has no more threads
            self._free_slots.release()
            client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(OSError):
                self._answer(client)
        finally:
            self._free_slots.release()

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(PASSWORD_S)
        password, number = REQUEST.unpack(_receive(client, REQUEST.size))
        if not secrets.compare_digest(password, self._password):
            return
        client.settimeout(LIMIT_S)
        with closing(self._give(number)) as answer:
            is_there = next(answer, None) is not None
            client.sendall(YES if is_there else NO)
            packed = next(answer, b"")
        if is_there:
            client.sendall(NBYTES.pack(len(packed)))
            for begin in range(0, len(packed), PIECE_NBYTES):  # the timeout holds for each call
                client.sendall(memoryview(packed)[begin : begin + PIECE_NBYTES])


def request_state(address: str, number: int, ready_s: float, copy_s: float) -> bytes | None:
    """Return the answer of the `StateServer` at `address`.

    Returns None if it says no, or nothing for `ready_s` seconds, and for `copy_s` seconds after it has said yes.
    """
    host, port, password = parse("the address of a state server", address, _parts)
    try:
        with socket.create_connection((host, port), ready_s) as line:
            line.sendall(REQUEST.pack(password, number))
            if _receive(line, len(YES)) != YES:
                return None
            line.settimeout(copy_s)
            return _receive(line, *NBYTES.unpack(_receive(line, NBYTES.size))) or None
    except OSError:
        return None


def _receive(line: socket.socket, nbytes: int) -> bytes:
    """Receive `nbytes`; raise `ConnectionError` if the other end sends less."""
    buffer = bytearray()  # grows with what arrives, not with the announced size
    while len(buffer) < nbytes:
        if not (piece := line.recv(min(PIECE_NBYTES, nbytes - len(buffer)))):
            raise ConnectionError
        buffer += piece
    return bytes(buffer)


def _parts(data: bytes) -> tuple[str, int, bytes]:
    host, port, password = data.decode().split()
    require(0 < int(port) < 65536 and len(password) == 2 * PASSWORD_NBYTES)
    return host, int(port), bytes.fromhex(password)
