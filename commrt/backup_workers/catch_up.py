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
from collections.abc import Callable, Mapping
from contextlib import suppress
from socket import gethostname
from threading import Event
from typing import NamedTuple, TypeVar

from torch.distributed import Store

from commrt.backup_workers.replica_state import READY, ReplicaState, StateTransfer, unpack
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.liveness import Listener
from commrt.errors import DeadlineExceeded, PeerLost, Place, QuorumLost
from commrt.runtime.world import World
from commrt.store.client import STORE_ANSWER_S, call_store, malformed, parse, require
from commrt.threads.deadline import Deadline

__all__ = ["CatchUp", "FinalCalls", "PendingCatchUp", "StateServer", "request_state"]

T = TypeVar("T")
_log = logging.getLogger("commrt")
READY_S, READY_SHARE = 3.0, 1 / 4
"""A source may take so long to say whether it has the state, and no more than this share of the timeout."""
STEP_SHARE = 1 / 3
"""For this share of that time a source waits until it comes to its next forward pass."""
ENDS_TRAINING = (QuorumLost, DeadlineExceeded, PeerLost)
"""Too few ranks are left, they do not answer, or the process that holds the store is gone."""
AGAIN_S = 0.01
"""Between two rounds of questions."""
IS_READY, STATE = b"R", b"S"
"""Questions: can the state be copied now, and what is it."""
PASSWORD_NBYTES = 16
REQUEST = struct.Struct(f"<{PASSWORD_NBYTES}scQ")
ANSWER = struct.Struct("<?Q")
PIECE_NBYTES = 1 << 20
LIMIT_S = 60.0
"""How long a client may be silent in the middle of a request."""
PASSWORD_S = 5.0
"""How long a client may be silent before it has sent the password."""
MAX_CLIENTS = 256
"""Clients at once; further ones are disconnected, and try again."""

Handler = Callable[[int], bytes | None]
"""Maps a number to the answer; None means no."""


class PendingCatchUp(NamedTuple):
    """The state that a late rank needs before it goes on."""

    version: int
    sources: tuple[int, ...]
    """The ranks that have it, in the order to ask them."""


class CatchUp:
    """Fetch the state of other ranks for this one, and answer their questions for this rank's `state`."""

    def __init__(self, world: World, membership: ElasticMembership, store: Store, state: ReplicaState) -> None:
        self._world, self._store, self._state = world, store, state
        self._membership = membership
        handlers = {IS_READY: self._is_ready, STATE: lambda version: state.give(version, self._copy_s)}
        self._service = StateServer(self._membership.host or gethostname(), handlers)

    def open(self) -> None:
        """Let other ranks ask this one."""
        self._ask(lambda: self._store.set(_key(self._world.rank), self._service.address))

    def close(self) -> None:
        """Answer no more questions."""
        self._service.close()

    @property
    def _ready_s(self) -> float:
        return min(READY_S, self._world.timeout_s * READY_SHARE)

    @property
    def _copy_s(self) -> float:
        return self._world.timeout_s / 2

    def _is_ready(self, version: int) -> bytes | None:
        return self._state.has(version, self._ready_s * STEP_SHARE)

    def fetch(self, pending: PendingCatchUp) -> StateTransfer:
        """Return the state of the first source that can give it; waits for one.

        Raises `QuorumLost` if all sources are gone, `DeadlineExceeded` if none has the state in time.
        """
        limit = Deadline(self._world.timeout_s, self._ready_s + self._copy_s)
        while True:
            is_late, members = limit.left_s <= 0, self._membership.generation.members
            for rank in (rank for rank in pending.sources if rank in members):
                if (answer := self._ask_source(rank, pending.version)) is not None:
                    return answer
            self._require_sources(pending, is_late=is_late)
            Event().wait(AGAIN_S)

    def _ask_source(self, rank: int, version: int) -> StateTransfer | None:
        """Return the state, or None if the rank does not have it; one that has it may take long to copy it."""
        key = _key(rank)
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        if found is None:
            return None
        address = parse(key, found, bytes.decode)
        if (answer := request_state(address, IS_READY, version, self._ready_s)) is None:
            return None
        if answer != READY:
            raise malformed("answer of a service", answer)
        packed = request_state(address, STATE, version, self._copy_s)
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

    def _ask(self, question: Callable[[], T]) -> T:
        return call_store(question, self._world.timeout_s + STORE_ANSWER_S, self._world.rank)


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
    """Answers requests of processes that can reach the host `towards`; a thread per client runs a handler."""

    def __init__(self, towards: str, handlers: Mapping[bytes, Handler]) -> None:
        self._handlers, self._password = handlers, secrets.token_bytes(PASSWORD_NBYTES)
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
        password, kind, number = REQUEST.unpack(_receive(client, REQUEST.size))
        if secrets.compare_digest(password, self._password) and kind in self._handlers:
            client.settimeout(LIMIT_S)
            answer = self._handlers[kind](number)
            client.sendall(ANSWER.pack(answer is not None, len(answer or b"")))
            for begin in range(0, len(answer or b""), PIECE_NBYTES):  # the timeout holds for each call
                client.sendall(memoryview(answer or b"")[begin : begin + PIECE_NBYTES])


def request_state(address: str, kind: bytes, number: int, limit_s: float) -> bytes | None:
    """The answer of the `StateServer` at `address`; None if it says no, or nothing for `limit_s` seconds."""
    host, port, password = parse("the address of a state server", address, _parts)
    try:
        with socket.create_connection((host, port), limit_s) as line:
            line.sendall(REQUEST.pack(password, kind, number))
            yes, nbytes = ANSWER.unpack(_receive(line, ANSWER.size))
            return _receive(line, nbytes) if yes else None
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


def _key(rank: int) -> str:
    return f"service/{rank}"
