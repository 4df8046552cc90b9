# SPDX-License-Identifier: Apache-2.0
"""The seam to the wire: groups of sends and receives that complete as a unit.

The rules are NCCL's, so that what runs on threads or sockets runs on GPUs unchanged:

* a *group* is all that one rank does in one hop; its transfers to different peers progress independently;
* between an ordered pair of ranks the k-th send meets the k-th receive; there are no tags;
* a send may wait for its receive (rendezvous), so an exchange outside one group can deadlock;
* both ends name the same size;
* one communicator is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from commrt.errors import UsageError

__all__ = [
    "CPU",
    "Allocate",
    "Exchange",
    "Group",
    "Moment",
    "Parcel",
    "Transport",
    "never",
    "require_cpu",
    "require_peers",
    "split_self",
    "zeros",
]

CPU = torch.device("cpu")


class Moment(NamedTuple):
    """When an exchange happens; ends up in errors and traces."""

    step: int
    """The training step."""
    bucket: int | str
    """The bucket, or a word for what is not a bucket."""


class Parcel(NamedTuple):
    """One end of one transfer."""

    peer: int
    data: Tensor
    """[numel] contiguous; read by a send, overwritten by a receive, while the exchange runs."""


@dataclass(frozen=True, slots=True)
class Group:
    """All that one rank sends and receives in one hop, in the order agreed with each peer."""

    sends: Sequence[Parcel]
    recvs: Sequence[Parcel]
    hop: int = 0
    """Place in the schedule, for errors."""


Exchange = Callable[[Moment], None]
"""Runs a bound group once: returns when all its transfers have happened, raises `TransportError` otherwise."""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(numel, dtype, device) -> zeros [numel]."""


def zeros(numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Ordinary memory, as an `Allocate`."""
    return torch.zeros(numel, dtype=dtype, device=device)


def never(work: Callable[[], None], group: Group) -> None:  # as a `Transport` does it
    """For transports that queue nothing: a ``capture``."""


def require_cpu(device: torch.device, medium: str) -> None:
    """Raise `UsageError` if `device` is none that `medium` can reach."""
    if device.type != "cpu":
        raise UsageError(f"{medium} moves CPU tensors, not those on {device}: move them to the CPU")


class Transport(Protocol):
    """What carries groups. Every implementation passes `commrt.testing.conformance`."""

    timeout_s: float
    """An exchange that takes longer ends in `DeadlineExceeded`. May be set between exchanges."""

    @property
    def kind(self) -> str:
        """What it moves bytes through, in a word."""
        ...

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def members(self) -> Sequence[int]:
        """The ranks between which it carries groups, in ascending order; not all of the world's, once one is lost."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Zeros [numel] in memory that this transport moves best; it lives as long as a tensor lies in it.

        Any other memory can be sent and received too. Raises `UsageError` for a device that it cannot move.
        """
        ...

    def bind(self, group: Group) -> Exchange:
        """Prepare `group` once, to be run many times.

        Parcels to this rank itself are paired in order and copied. Raises `UsageError` for a peer that does
        not exist or a self transfer without its other end.
        """
        ...

    def capture(self, work: Callable[[], None], group: Group) -> Exchange | None:
        """Remember what `work` queues, exchanges of `group` among it, and return what queues all of it again at once.

        None where nothing is queued. Raises `RuntimeError` if the device refuses.
        """
        ...

    def close(self) -> None:
        """Release everything; later exchanges raise `TransportClosed`. Safe to call twice.

        What was sent arrives; peers that still wait for this rank learn it as soon as the medium allows.
        """
        ...

    def abort(self) -> None:
        """As `close`, from any thread: an exchange that is running on another one ends in `TransportClosed`.

        What that uses may be kept: `close` is still due.
        """
        ...


def split_self(group: Group, rank: int, members: Sequence[int]) -> tuple[Group, list[tuple[Tensor, Tensor]]]:
    """Separate transfers to this rank itself: the rest, and (source, target) pairs to copy.

    Empty parcels are dropped: both ends know that they are empty.
    """
    require_peers(group, members)
    own = [p.data for p in group.sends if p.peer == rank], [p.data for p in group.recvs if p.peer == rank]
    if [len(data) for data in own[0]] != [len(data) for data in own[1]]:
        raise UsageError(
            f"hop {group.hop}: rank {rank} sends itself {len(own[0])} parcels and receives {len(own[1])}, or their "
            "sizes differ: every send to self needs its receive in the same group"
        )
    sends, recvs = (tuple(p for p in side if p.peer != rank and p.data.numel()) for side in (group.sends, group.recvs))
    return Group(sends, recvs, group.hop), list(zip(*own, strict=True))


def require_peers(group: Group, members: Sequence[int]) -> None:
    """Raise `UsageError` if `group` names a rank that is none of `members`."""
    if strangers := sorted({p.peer for p in (*group.sends, *group.recvs)} - set(members)):
        raise UsageError(f"hop {group.hop} names ranks {strangers}, but there are only ranks {_listed(members)}")


def _listed(members: Sequence[int]) -> str:
    whole = list(members) == list(range(len(members)))
    return f"0..{len(members) - 1}" if whole else ", ".join(map(str, members))
