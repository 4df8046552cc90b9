# SPDX-License-Identifier: Apache-2.0
"""Sockets between processes, through torch's Gloo backend: the CPU transport between hosts.

The Gloo backend object is our own, on the given store. ``torch.distributed`` is never initialised,
so your own process groups are not touched.

Gloo matches messages by tag and does not compare sizes. Each message's tag is made of its number
between the two ranks, its size and its call: that keeps the order, and ranks that disagree end in a
deadline instead of wrong data.

A transport either runs groups, on the thread that exchanges, or its owner calls `post`, on any
thread, with tags of its own (`commrt.c10d.host_messages`): one of them could equal the tag of a
group's message. Any thread may `allocate`, set `timeout_s` and `abort`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from commrt.errors import (
    DeadlineExceeded,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
)
from commrt.store.client import call_store
from commrt.store.environment import variable
from commrt.store.parsing import typed
from commrt.store.records import gather
from commrt.threads.deadline import clock
from commrt.threads.forking import release_in_forked_child
from commrt.transport.bind_checks import require_cpu, split_self
from commrt.transport.gloo_listeners import refuse_connections
from commrt.transport.library_errors import cause_of
from commrt.transport.protocol import CPU, Exchange, P2PGroup, Tag, Transport

UNUSED_TAG = (1 << 31) - 1
"""The largest of Gloo's tags, a signed int in torch: no group has it; see `GlooTransport.close`.

Nor may a message that is posted: if nobody has received it, Gloo would end the process in `close`.
"""
SPREAD = 0x9E3779B1
"""By which a message's number is multiplied in its tag, so that sizes and calls do not undo it."""
POLL_S = 0.001
"""Seconds for which a failed group asks each of its other transfers for its result."""


class _Transfer(NamedTuple):
    peer: int
    data: Tensor
    is_send: bool
    numbers: count[int]
    """Counts all transfers with this peer in this direction, of all groups."""


class GlooTransport(Transport):
    """One rank of a group of processes; a `Transport` for CPU tensors.

    Connects to all other `members` through a `store` that nobody used before; raises
    `TransportError` if one does not come. `address` is what this rank listens on, None for Gloo's
    own choice (``GLOO_SOCKET_IFNAME``); who shares a host does not matter here. If `lazy`, it waits
    for nobody, and two ranks connect when they first exchange.
    """

    kind = "gloo"

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float = 300.0,
        address: str | None = None,
        _local_members: Sequence[int] = (),
        *,
        lazy: bool = False,
    ) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s
        self._sent = {peer: count() for peer in members}
        self._received = {peer: count() for peer in members}
        self._lazy = lazy
        self._used = set(() if lazy else range(len(members)))
        """Indices of members to which a connection may lead: any thread adds those that it uses."""
        # reads all of the above
        self._gloo: Any = self._connect(store, address)
        """Gloo's own object; None once any thread has closed this one."""
        release_in_forked_child(self)

    def _connect(self, store: Store, address: str | None) -> Any:
        """Return Gloo's object, connected once all ranks can listen; if lazy, it only listens."""
        begun_s = clock.now_s()
        devices = list[Any]()
        problem = ""
        try:
            devices = _devices(address, lazy=self._lazy)
        except (OSError, RuntimeError, MemoryError) as error:
            problem = cause_of(error)
        problems = {self.rank: problem} if self._lazy else self._gather(store, problem)
        for rank, why in problems.items():
            if why:
                raise TransportError(
                    f"rank {rank} cannot listen for the others: {why}. Between hosts, "
                    "GLOO_SOCKET_IFNAME names the network card; `ulimit -n` and `ulimit -v` limit "
                    "open files and memory",
                    Place(self.rank, rank),
                )
        index = self.members.index(self.rank)
        ranks = len(self.members)
        left_s = max(begun_s + self.timeout_s - clock.now_s(), POLL_S)
        try:
            make = partial(ProcessGroupGloo, store, index, ranks, _options(devices, left_s))
            gloo: Any = call_store(make, left_s, self.rank)
        except (RuntimeError, MemoryError, TransportError) as error:
            passed_s = min(clock.now_s() - begun_s, self.timeout_s)
            raise TransportError(
                f"not all {ranks} ranks connected within {passed_s:.1f} s: {cause_of(error)}. Look "
                "at the output of the other ranks. Between hosts, a firewall must let all ports "
                "through, and GLOO_SOCKET_IFNAME names the network card",
                Place(self.rank),
            ) from error
        if not self._lazy:
            addresses = partial(_published, store, index, len(devices))
            refuse_connections(call_store(addresses, rank=self.rank))
        return gloo

    def _gather(self, store: Store, problem: str) -> dict[int, str]:
        said = PrefixStore("listens", store)
        limit_s = self.timeout_s
        request = partial(gather, said, self.rank, self.members, [problem], limit_s, _parse_problem)
        return call_store(request, limit_s, self.rank)

    @property
    def process_group(self) -> ProcessGroupGloo | None:
        """Gloo's own object, for code of torch that asks for one, until `close`."""
        return cast("ProcessGroupGloo | None", self._gloo)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        require_cpu(device)
        return super().allocate(numel, dtype)

    def post(self, data: Tensor, peer: int | None, tag: int, *, is_send: bool) -> Work:
        """Begin one send or receive by Gloo's tag; from any rank if None. Not beside groups."""
        gloo = self._gloo  # of which no reference may stay: connections live as long as one
        if gloo is None:
            raise TransportClosed("the transport was closed", Place(self.rank, peer))
        if peer is None:
            begun = gloo.recv_anysource([data], tag)
            self._used.update(range(len(self.members)))
        else:
            index = self.members.index(peer)
            post = gloo.send if is_send else gloo.recv
            begun = post([data], index, tag)
            self._used.add(index)
        return cast("Work", begun)

    def bind(self, group: P2PGroup) -> Exchange:
        start = self.bind_start(group)
        return lambda tag: start(tag)()

    def bind_start(self, group: P2PGroup) -> Callable[[Tag], Callable[[], None]]:
        """Bind `group`; a run only starts its transfers, and returns what waits for them."""
        rest, copies = split_self(group, self.rank, self.members)
        for message in (*rest.sends, *rest.recvs):
            require_cpu(message.data.device)
        transfers = [
            _Transfer(peer, data, False, self._received[peer]) for peer, data, _ in rest.recvs
        ]
        transfers += [_Transfer(peer, data, True, self._sent[peer]) for peer, data, _ in rest.sends]
        return partial(self._start, transfers, copies, rest.hop)

    def _start(
        self,
        transfers: Sequence[_Transfer],
        copies: Sequence[tuple[Tensor, Tensor]],
        hop: int,
        tag: Tag,
    ) -> Callable[[], None]:
        """Begin `transfers`; return `_finish` for them, which was called if one could not begin."""
        place = tag.place(self.rank, hop)
        if self._gloo is None:
            raise TransportClosed("the transport was closed", place)
        for source, target in copies:
            target.copy_(source)
        begun = list[tuple[_Transfer, Work]]()
        failed = list[tuple[_Transfer, Exception]]()
        deadline = clock.now_s() + self.timeout_s
        for transfer in transfers:
            number = next(transfer.numbers) * SPREAD ^ transfer.data.nbytes ^ tag.call
            try:
                work = self.post(
                    transfer.data, transfer.peer, number % UNUSED_TAG, is_send=transfer.is_send
                )
            except (RuntimeError, TransportClosed) as error:
                failed.append((transfer, error.with_traceback(None)))
                break
            begun.append((transfer, work))
        finish = partial(self._finish, begun, failed, deadline, place)
        if failed:
            finish()
        return finish

    def _finish(
        self,
        begun: Sequence[tuple[_Transfer, Work]],
        failed: list[tuple[_Transfer, Exception]],
        deadline: float,
        place: Place,
    ) -> None:
        """Wait until all of `begun` are over; raise if one fails, or if one `failed` to begin.

        Adds to `failed`.
        """
        for transfer, work in begun:
            # After a failure, only look whether others have failed too.
            left_s = 0.0 if failed else deadline - clock.now_s()
            try:
                work.wait(timedelta(seconds=max(left_s, POLL_S)))
            except RuntimeError as error:
                # a traceback would keep `begun` alive
                failed.append((transfer, error.with_traceback(None)))
        if failed:
            raise self._explained(failed, place) from failed[0][1]

    def _explained(
        self, failed: Sequence[tuple[_Transfer, Exception]], place: Place
    ) -> TransportError:
        """Return the error with the peer: of a broken connection if any, else of a late rank."""
        transfer, error = next((each for each in failed if not _is_late(each[1])), failed[0])
        place = replace(place, peer=transfer.peer, nbytes=transfer.data.nbytes)
        if self._gloo is None:
            return TransportClosed("this rank gave the transport up during the transfer", place)
        if not _is_late(error):
            what = (
                "the connection to the peer broke: its process ended or gave up; look at its own"
                " output"
            )
            return PeerLost(what, place)
        peers = sorted({each.peer for each, _ in failed})
        what = (
            f"timed out: no answer from ranks {peers} within {self.timeout_s:g} s: slow, stopped,"
            " or running another program"
        )
        return DeadlineExceeded(what, place)

    def close(self) -> None:
        """Close all connections, even if referenced; peers that wait for this rank see them break.

        Gloo's own ``abort`` and ``shutdown`` leave the sockets open (torch 2.13). A receive that
        times out closes them. It fails at once on a connection that is already broken, so every
        peer is tried; of lazy connections those that this rank has used, as a receive would make
        others.
        """
        gloo = self._gloo
        self._gloo = None
        own = self.members.index(self.rank)
        for index in self._used - {own} if gloo is not None else ():
            with suppress(RuntimeError):
                gloo.recv([torch.empty(1, device=CPU)], index, UNUSED_TAG).wait(
                    timedelta(seconds=POLL_S)
                )

    abort = close

    def leave_to_parent(self) -> None:
        """Never touch the connections again in a forked child, not even to free them.

        Gloo's threads do not exist there, and its destructor waits for them (torch 2.13). It would
        also take the sockets out of the epoll set that the child shares with the parent.
        """
        gloo = self._gloo
        self._gloo = None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


def _devices(address: str | None, *, lazy: bool) -> list[Any]:
    """Return what Gloo listens on: `address`, or its own choice."""
    how: Any = {"lazy_init": lazy}
    if address:
        return [ProcessGroupGloo.create_device(hostname=address, **how)]
    interfaces = variable("GLOO_SOCKET_IFNAME")
    if interfaces:
        return [
            ProcessGroupGloo.create_device(interface=each, **how) for each in interfaces.split(",")
        ]
    return [ProcessGroupGloo.create_default_device(**how)]


def _options(devices: list[Any], timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # torch's stub is behind
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._devices = devices  # noqa: SLF001
    options._threads = 2 * len(devices)  # noqa: SLF001  # as torch without options
    return options


def _published(store: Store, index: int, devices: int) -> bytes:
    """Return the addresses that Gloo has written for a member, under keys of its own."""
    keys = [f"{number}/{index}" for number in range(devices)]
    return b"".join(store.get(key) for key in keys if store.check([key]))


def _parse_problem(text: bytes) -> str:
    return str(*typed(json.loads(text), str))


def _is_late(error: Exception) -> bool:
    """Return True for a timeout, also in the words with which Gloo then ends other transfers."""
    return "Timed out" in str(error) or "Application timeout" in str(error)
