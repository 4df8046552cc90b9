# SPDX-License-Identifier: Apache-2.0
"""Liveness probes, which tell whether a rank's process still exists; and reports of failing ranks.

Each process listens on a port that its kernel closes when it ends, however it ends. A broken connection says nothing,
and a store does not know who has died. A process that is only stopped still counts as alive: its kernel answers.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TypeVar

from torch.distributed import Store

from commrt.errors import TransportError, UsageError
from commrt.membership.store_client import (
    MALFORMED,
    STORE_ANSWER_S,
    StoreCall,
    call_store,
    parse,
    parse_dict,
    parse_int,
    parse_list,
    require,
)
from commrt.threads.comm_thread import release_in_forked_child
from commrt.threads.deadline import Deadline

__all__ = [
    "CLOSED_ERRNOS",
    "LivenessListener",
    "Processes",
    "diagnose",
    "leave_report",
    "own_address",
    "probe",
    "wait_for_readers",
]

PROBE_S = 2.0
"""How long a host may take to answer a probe."""
CLOSED_ERRNOS = (errno.EBADF, errno.EINVAL)
"""What ``accept`` reports for a socket that was closed."""
DISCARD_PORT = 9
"""UDP's discard: no packet is sent there."""
ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255} [0-9]{1,5}")


class LivenessListener:
    """Shows that this process lives, to every process that can reach the host `towards`."""

    def __init__(self, towards: str) -> None:
        host = own_address(towards)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.address = f"{host} {self._socket.getsockname()[1]}"
        release_in_forked_child(self)
        threading.Thread(target=_accept, args=(self._socket,), daemon=True, name="commrt-liveness").start()

    def close(self) -> None:
        """Stop listening: from now on the process counts as gone. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not answer for its parent."""
        self._socket.close()


def own_address(towards: str) -> str:
    """Return the address of this host that leads to the host `towards`."""
    family, kind, _, _, target = socket.getaddrinfo(towards, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: the kernel only chooses
        return str(probe.getsockname()[0])


def probe(address: str) -> bool | None:
    """Return True if a process listens at a `LivenessListener.address`, False if none does, None if its host is silent.

    A host that does not answer may be alive.
    """
    host, port = address.split()
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # too slow, out of reach, or this process has no sockets left
        return None
    return True


def _accept(listener: socket.socket) -> None:
    while listener.fileno() >= 0:
        try:
            listener.accept()[0].close()
        except OSError as error:
            if error.errno in CLOSED_ERRNOS:
                return
            Event().wait(PROBE_S)  # no descriptors left; the kernel answers meanwhile


class Processes:
    """The processes of all ranks: which one has a rank's place now, and whether it lives.

    Each process writes its incarnation (how many processes had the rank's place before it) and its address on the
    store. Without a `host` that all can reach (ranks are threads of one process) no process ever counts as gone.
    `call_store` runs a request to the store within a deadline. Safe to use from several threads.
    """

    def __init__(self, store: Store, rank: int, host: str | None, call_store: StoreCall) -> None:
        self._store, self._rank, self._call_store = store, rank, call_store
        self._listener = None if host is None else LivenessListener(host)
        self._addresses: dict[tuple[int, int], str] = {}  # by rank and incarnation
        self.incarnation = 0
        """Of this process."""

    def register(self) -> None:
        """Publish the address of this process, the first of its rank."""
        if self._listener is not None:
            self._publish("", self._listener)

    def replace(self) -> None:
        """Publish this process in place of the last one of its rank; raise `UsageError` if two do so at once."""
        latest = self._latest(self._rank)
        if latest is None or self._listener is None:
            raise UsageError(f"rank {self._rank} has left no address on the store, so no process can take its place")
        self.incarnation = latest[0] + 1
        self._publish(json.dumps(latest), self._listener)

    def _publish(self, before: str, listener: LivenessListener) -> None:
        own = json.dumps([self.incarnation, listener.address])
        stands = self._call_store(lambda: self._store.compare_set(_key(self._rank), before, own))
        if stands != own.encode():
            raise UsageError(
                f"two processes take the place of rank {self._rank} at once, and the other one came first: start one"
            )

    def answers(self, rank: int) -> bool:
        """Return True if the latest process of `rank` lives, as far as this host can tell."""
        latest = self._latest(rank)
        return latest is not None and probe(latest[1]) is True

    def is_gone(self, rank: int, incarnation: int) -> bool:
        """Return True if that process of `rank` does not live. An unreachable host may be alive, and takes 2 s."""
        if self._listener is None:
            return False
        address = self._addresses.get((rank, incarnation))
        if address is None:
            latest = self._latest(rank)
            if latest is None:
                return False
            if latest[0] != incarnation:
                return latest[0] > incarnation  # another process has its place
            address = self._addresses[rank, incarnation] = latest[1]
        return probe(address) is False

    def _latest(self, rank: int) -> tuple[int, str] | None:
        """Return the incarnation and the address of the latest process of `rank`."""
        key = _key(rank)
        text = self._call_store(lambda: self._store.get(key) if self._store.check([key]) else None)
        if text is None:
            return None
        return parse(key, text, _parse_process)

    def close(self) -> None:
        """Stop listening: from now on this process counts as gone. Safe to call twice."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.close()


def _parse_process(text: bytes) -> tuple[int, str]:
    incarnation, address = parse_list(text, 2)
    require(ADDRESS.fullmatch(address) and int(address.split()[1]) < 65536)
    return parse_int(incarnation), address


def _key(rank: int) -> str:
    return f"process/{rank}"


GRACE_S = 1.0
"""How much later than this rank a peer may report: deadlines do not expire at the same instant."""
POLL_S = 0.02
"""Between two questions whether a report is there."""
LINGER_S = 3.0
"""How long a failing rank that holds the store waits for the others to read the reports."""

T = TypeVar("T")


def leave_report(store: Store, rank: int, failure: BaseException) -> None:
    """Write what `rank` saw to `store`."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps({"peer": peer, "saw": f"{type(failure).__name__}: {failure}"})
    _answered(lambda: store.set(_report_key(rank), report), STORE_ANSWER_S)


def diagnose(store: Store, rank: int, size: int, failure: BaseException) -> None:
    """Add to `failure` what the peers saw for which it was waiting, directly or through others."""
    if isinstance(failure, TransportError) and failure.place.peer is not None:
        first = failure.place.peer
        sentences = _answered(lambda: list(_trail(store, rank, first)), STORE_ANSWER_S + GRACE_S)
        failure.elsewhere = ". ".join(sentences or ())
    _answered(lambda: _count(store, size), STORE_ANSWER_S)


def wait_for_readers(store: Store) -> None:
    """Keep the store of this process alive until the others have read the reports, at most `LINGER_S`."""
    _answered(lambda: store.wait(["reports read"], timedelta(seconds=LINGER_S)), LINGER_S + STORE_ANSWER_S)


def _trail(store: Store, rank: int, peer: int | None) -> Iterator[str]:
    seen = {rank}
    while peer is not None and peer not in seen:
        seen.add(peer)
        if not _is_there(store, _report_key(peer), GRACE_S):
            yield f"Rank {peer} reported nothing: look there first"
            return
        report = parse_dict(store.get(_report_key(peer)))
        yield f"Rank {peer} saw {report['saw']!s:.1000}"
        peer = None if report["peer"] is None else parse_int(report["peer"])


def _is_there(store: Store, key: str, limit_s: float) -> bool:
    """Return True once `key` is there, False after `limit_s`.

    It asks again and again. A request that waits would hold up the reports of all groups that share its connection.
    """
    deadline = Deadline(limit_s)
    while not (found := store.check([key])) and deadline.left_s > 0:
        Event().wait(POLL_S)
    return bool(found)


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _report_key(rank: int) -> str:
    return f"report/{rank}"


def _answered(request: Callable[[], T], limit_s: float) -> T | None:
    """Return the store's answer, or None: this rank has failed already, and a lost store adds nothing to that."""
    with suppress(RuntimeError, TransportError, *MALFORMED):
        return call_store(request, limit_s)
    return None
