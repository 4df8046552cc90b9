# SPDX-License-Identifier: Apache-2.0
"""A service in each rank that answers other ranks' requests for its state, and the client that asks."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event

from commrt.elastic.liveness import CLOSED_ERRNOS
from commrt.store.client import parse, require
from commrt.store.rendezvous import own_address
from commrt.threads.comm_thread import release_in_forked_child

__all__ = ["StateServer", "request_state"]

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


class StateServer:
    """Listens for processes that can reach the host `towards`; a thread per client runs the handler of its request."""

    def __init__(self, towards: str, handlers: Mapping[bytes, Handler]) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._handlers, self._password = handlers, secrets.token_bytes(PASSWORD_NBYTES)
        self._free_slots = threading.Semaphore(MAX_CLIENTS)
        self.address = f"{host} {self._listener.getsockname()[1]} {self._password.hex()}"
        """To be written to the store."""
        release_in_forked_child(self)
        threading.Thread(target=self._listen, daemon=True, name="commrt-state-server").start()

    def close(self) -> None:
        """Accept no more clients. Safe to call twice."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._listener.close()

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not hold the port."""
        self._listener.close()

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                client = self._listener.accept()[0]
            except OSError as error:
                if error.errno in CLOSED_ERRNOS:
                    return
                Event().wait(1.0)  # no descriptors left
                continue
            self._admit(client)

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
