# SPDX-License-Identifier: Apache-2.0
"""A server in each rank from which others get its state, and the request with which they ask it.

Others are a late rank, or one that comes. What the bytes mean is decided elsewhere.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress

from commrt.elastic.listener import Listener
from commrt.errors import TransportError
from commrt.store.parsing import parse, require
from commrt.threads.starting import start_thread

PASSWORD_NBYTES = 16
REQUEST = struct.Struct(f"<{PASSWORD_NBYTES}sQ")
NBYTES = struct.Struct("<Q")
YES = b"\1"
PIECE_NBYTES = 1 << 20
LIMIT_S = 60.0
"""How long a client may be silent in the middle of a request."""
PASSWORD_S = 5.0
"""How long a client may be silent before it has sent the password."""
MAX_CLIENTS = 256
"""Clients at once that have sent the password; further ones are disconnected, and try again."""
MAX_SILENT = 16
"""Clients at once that have sent no password yet. One more disconnects the one that came first."""


class StateServer(Listener):
    """Answers requests of processes that can reach the host `towards`; a thread per client calls
    `give`, with the number that was asked for.

    ``give`` yields once when it can answer, and then the answer; if it yields nothing, that is no.
    The threads of the listener and of clients change `_silent`, under `_lock`.
    """

    def __init__(self, towards: str, give: Callable[[int], Generator[bytes]]) -> None:
        self._give = give
        self._password = secrets.token_bytes(PASSWORD_NBYTES)
        self._free_slots = threading.Semaphore(MAX_CLIENTS)
        self._silent: deque[socket.socket] = deque()
        """Clients that have sent no password yet, in the order in which they came."""
        self._lock = threading.Lock()
        # last, as it starts the thread that calls `_admit`
        super().__init__(towards, self._admit, "commrt-state-server")
        self.address += f" {self._password.hex()}"

    def _admit(self, client: socket.socket) -> None:
        with self._lock:
            self._silent.append(client)
            if len(self._silent) > MAX_SILENT:
                with suppress(OSError):  # it has left
                    self._silent.popleft().shutdown(socket.SHUT_RDWR)  # which wakes its thread
        try:
            start_thread(self._serve, "commrt-state-server", client)
        except TransportError:  # the system has no more threads
            self._end_silence(client)
            client.close()

    def _end_silence(self, client: socket.socket) -> bool:
        """Forget that `client` is silent; return False if it was disconnected meanwhile."""
        with self._lock, suppress(ValueError):
            self._silent.remove(client)
            return True
        return False

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            try:
                number = self._request(client)
            finally:
                is_kept = self._end_silence(client)
            if number is not None and is_kept and self._free_slots.acquire(blocking=False):
                try:
                    self._answer(client, number)
                finally:
                    self._free_slots.release()

    def _request(self, client: socket.socket) -> int | None:
        """Return the number that `client` sends for `give`, None without the password."""
        client.settimeout(PASSWORD_S)
        password, number = REQUEST.unpack(_receive(client, REQUEST.size))
        return number if secrets.compare_digest(password, self._password) else None

    def _answer(self, client: socket.socket, number: int) -> None:
        client.settimeout(LIMIT_S)
        with closing(self._give(number)) as answer:
            if next(answer, None) is None:
                return  # which hangs up, and says no
            client.sendall(YES)
            packed = next(answer, b"")
        client.sendall(NBYTES.pack(len(packed)))
        for begin in range(0, len(packed), PIECE_NBYTES):  # the timeout holds for each call
            client.sendall(memoryview(packed)[begin : begin + PIECE_NBYTES])


def request_state(address: bytes | str, number: int, ready_s: float, copy_s: float) -> bytes | None:
    """Return the answer of the `StateServer` at `address`.

    Returns None if it says no, or nothing for `ready_s` seconds, and for `copy_s` seconds after it
    has said yes.
    """
    host, port, password = parse("the address of a state server", address, _parts)
    try:
        with socket.create_connection((host, port), ready_s) as line:
            line.sendall(REQUEST.pack(password, number))
            if _receive(line, len(YES)) != YES:
                return None
            line.settimeout(copy_s)
            return _receive(line, *NBYTES.unpack(_receive(line, NBYTES.size))) or None
    except (OSError, UnicodeError):  # the second for a host that is no name
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
