# SPDX-License-Identifier: Apache-2.0
"""What a rank does for others while it trains: it hands out its state, and comes when it is called.

On sockets and threads of its own, so that who is slow disturbs nobody. A caller shows a password that was told on the
store, asks one question of a kind and a number, and gets yes and some bytes, or no.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event

from commrt.store.doorbell import OVER, own_address
from commrt.store.hearsay import require, understood

__all__ = ["Service", "asked"]

PASSWORD_NBYTES = 16
QUESTION = struct.Struct(f"<{PASSWORD_NBYTES}scQ")
ANSWER = struct.Struct("<?Q")
PIECE_NBYTES = 1 << 20
LIMIT_S = 60.0
"""How long a caller may be silent in the middle of a conversation."""
QUESTION_S = 5.0
"""How long a stranger may be, who has shown no password yet."""
MOST_CALLERS = 256
"""At once; who calls then is shown out, and calls again."""

Handler = Callable[[int], bytes | None]
"""What to answer to a number; None for no."""


class Service:
    """Listens where the host `towards` leads to, and answers each kind of question by its handler, on a thread each."""

    def __init__(self, towards: str, handlers: Mapping[bytes, Handler]) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._handlers, self._password = handlers, secrets.token_bytes(PASSWORD_NBYTES)
        self._room = threading.Semaphore(MOST_CALLERS)
        self.address = f"{host} {self._listener.getsockname()[1]} {self._password.hex()}"
        """For the store."""
        threading.Thread(target=self._listen, daemon=True, name="commrt-service").start()

    def close(self) -> None:
        """Take no more callers. Safe to call twice."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._listener.close()

    def _listen(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                caller = self._listener.accept()[0]
            except OSError as error:
                if error.errno in OVER:
                    return
                Event().wait(1.0)  # no descriptors left
                continue
            self._let_in(caller)

    def _let_in(self, caller: socket.socket) -> None:
        """On a thread, if there is room for one."""
        if not self._room.acquire(blocking=False):
            caller.close()
            return
        try:
            threading.Thread(target=self._serve, args=(caller,), daemon=True, name="commrt-service").start()
        except RuntimeError:  # the system has no more threads
            self._room.release()
            caller.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, suppress(OSError):
                self._converse(caller)
        finally:
            self._room.release()

    def _converse(self, caller: socket.socket) -> None:
        caller.settimeout(QUESTION_S)
        password, kind, number = QUESTION.unpack(_received(caller, QUESTION.size))
        if secrets.compare_digest(password, self._password) and kind in self._handlers:
            caller.settimeout(LIMIT_S)
            answer = self._handlers[kind](number)
            caller.sendall(ANSWER.pack(answer is not None, len(answer or b"")))
            caller.sendall(answer or b"")


def asked(address: str, kind: bytes, number: int, limit_s: float) -> bytes | None:
    """The answer of the `Service` at `address`; None if it says no, or nothing for `limit_s` seconds."""
    host, port, password = understood("address of a service", address, _parts)
    try:
        with socket.create_connection((host, port), limit_s) as line:
            line.sendall(QUESTION.pack(password, kind, number))
            yes, nbytes = ANSWER.unpack(_received(line, ANSWER.size))
            return _received(line, nbytes) if yes else None
    except OSError:
        return None


def _received(line: socket.socket, nbytes: int) -> bytes:
    """Raises `ConnectionError` if the other end says less."""
    buffer = bytearray()  # grows with what comes, not with what was announced
    while len(buffer) < nbytes:
        if not (piece := line.recv(min(PIECE_NBYTES, nbytes - len(buffer)))):
            raise ConnectionError
        buffer += piece
    return bytes(buffer)


def _parts(said: bytes) -> tuple[str, int, bytes]:
    host, port, password = said.decode().split()
    require(0 < int(port) < 65536 and len(password) == 2 * PASSWORD_NBYTES)
    return host, int(port), bytes.fromhex(password)
