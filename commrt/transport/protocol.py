# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport: groups of sends and receives, each completed as a unit.

A rank may have several transports (`commrt.transport.by_device`).

The rules are NCCL's, so that what runs on threads or sockets also runs on GPUs:

* a group holds all that one rank sends and receives in one hop, its part of a step of a schedule;
  its transfers with different peers are independent;
* the k-th send from one rank to another matches the k-th receive there; messages carry no tags.
  Where the medium has room, they carry the number of their call, and two ends that differ in it
  fail: shared memory and threads of one process raise `CallMismatch`, Gloo waits until the
  deadline, NCCL does not compare;
* a send may wait for its receive: put both in one group, or two ranks that send first wait for each
  other;
* both ends of a transfer give the same size;
* only one thread at a time uses a transport. But any thread may `allocate`, set `timeout_s` and
  call `abort`.

A transport writes to the tensors of receives only, and sets them to other memory (`point`) only in
a loan, see `Exchange`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.errors import Place, TransportError
from commrt.transport.library_errors import cause_of

CPU = torch.device("cpu")


class Tag(NamedTuple):
    """Label of a transfer in errors and traces; only `call` is sent, where the medium has room."""

    step: int
    """The training step."""
    bucket: int | str
    """The bucket's number, or a word for a transfer without a bucket."""
    call: int = 0
    """32 bits that both ends must give alike, such as a checksum of what the caller asked for."""

    def place(
        self, rank: int, hop: int, peer: int | None = None, nbytes: int | None = None
    ) -> Place:
        """Return where in the run `rank` is, for errors."""
        return Place(rank, peer, self.step, self.bucket, hop, nbytes)


class P2PMessage(NamedTuple):
    """One end of one transfer."""

    peer: int
    data: Tensor
    """[numel] contiguous; a send reads it and a receive overwrites it while the group runs."""
    group: int | None = None
    """Which of several NCCL groups carries it, the same at both ends: see `commrt.nccl_groups`."""


@dataclass(frozen=True, slots=True)
class P2PGroup:
    """All messages of one rank in one hop, in the order agreed with each peer."""

    sends: Sequence[P2PMessage]
    recvs: Sequence[P2PMessage]
    hop: int = 0
    """Number of the hop in the schedule, for errors."""
    reads: bool = False
    """True if the caller only reads what it receives: it may be the sender's, until returned."""

    @property
    def peers(self) -> set[int]:
        """Ranks that this group sends to or receives from."""
        return {message.peer for message in (*self.sends, *self.recvs)}

    def split(self, ranks: Collection[int]) -> tuple[P2PGroup, P2PGroup]:
        """Return the messages with `ranks`, and all others."""
        inside = replace(
            self,
            sends=[each for each in self.sends if each.peer in ranks],
            recvs=[each for each in self.recvs if each.peer in ranks],
        )
        outside = replace(
            self,
            sends=[each for each in self.sends if each.peer not in ranks],
            recvs=[each for each in self.recvs if each.peer not in ranks],
        )
        return inside, outside


EndLoan = Callable[[], None]
"""Tells senders that their memory was read; waits for all transfers, or raises `TransportError`."""

Exchange = Callable[[Tag], EndLoan | None]
"""Runs a bound group once: returns when all its transfers are complete, or raises `TransportError`.

Of a group that `reads`, it may set the tensors of receives to the senders' memory
(``Tensor.set_``), and return when all is there to be read: then it returns what the caller must
call before the next group.
"""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(numel, dtype, device) -> zeros [numel]."""


class Transport(ABC):
    """Runs groups of messages. Every implementation passes `commrt.testing.conformance`.

    What is not abstract here suits ordinary memory, without windows, where nothing is queued or
    captured.
    """

    kind: str
    """Name of the medium, such as ``gloo``."""
    rank: int
    members: Sequence[int]
    """Connected ranks in ascending order: some of the world's once one is lost."""
    timeout_s: float
    """Deadline of a group, then `DeadlineExceeded`. Its owner sets it, for groups yet to begin."""
    one_host: bool = False
    """True if it needs all members on one host."""
    can_move_receives: bool = True
    """True if receives may be set (``Tensor.set_``) to other memory of their size between runs."""

    @property
    def per_host(self) -> int:
        """How many members it takes to share this rank's host."""
        return len(self.members) if self.one_host else 1

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Return zeros [numel] in the memory that this transport moves fastest; tensors keep it.

        Tensors in any other memory can be sent and received too. Raises `UsageError` for a device
        out of reach.
        """
        return zeros(numel, dtype, device)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Return zeros [numel] that `share` can show to peers; may wait for the device."""
        return self.allocate(numel, dtype, device)

    @abstractmethod
    def bind(self, group: P2PGroup) -> Exchange:
        """Prepare `group` once, to run it many times.

        Raises `UsageError` as `commrt.transport.bind_checks.split_self` does.
        """

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """Record what `work` queues on the device; return a function that queues all of it again.

        That function keeps `work` alive, with all memory that it uses. `group` holds the messages
        that `work` exchanges. Returns None if this transport queues nothing. Raises `RuntimeError`
        if the device refuses.
        """
        return None

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        """Return windows of `allocate_shared` buffers; () if peers cannot read. Collective."""
        return ()

    def wait(self) -> None:  # noqa: B027  # most queue nothing
        """Wait until all queued groups are complete; raise an error that no call has raised yet."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; later groups raise `TransportClosed`. Safe to call twice.

        What was sent arrives. Peers that still wait for this rank fail as soon as the medium
        reports its end.
        """

    @abstractmethod
    def abort(self) -> None:
        """Fail another thread's group with `TransportClosed`, from any thread; call `close` too."""


def zeros(numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return zeros [numel] in ordinary memory, as an `Allocate`."""
    try:
        return torch.zeros(numel, dtype=dtype, device=device)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        what = f"this process has no memory for a buffer: {cause_of(error)}"
        raise TransportError(what, Place(nbytes=numel * dtype.itemsize)) from error


class Window(NamedTuple):
    """A buffer of this rank that peers read where it lies, and the same buffer of each of them."""

    peers: Mapping[int, Tensor]
    """By rank of this host, its buffer, of the dtype of this rank's. Never write to it."""
    bind: Callable[..., Exchange]
    """Binds a signal to peers and a wait for theirs: `PeersTransport.bind_signal_wait`."""


def point(target: Tensor, memory: Tensor) -> None:
    """Set `target` to `memory`, which has its size and dtype."""
    target.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
