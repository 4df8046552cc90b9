# SPDX-License-Identifier: Apache-2.0
"""A generation: who the members of a world are, and since when, as a value.

Values and pure functions, for any thread. `commrt.runtime.membership` holds the generation that
runs; `commrt.elastic` decides which one follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Members = tuple[int, ...]
"""Ranks that exchange: ``members[i]`` plays rank i of a schedule."""

NOBODY: Mapping[int, int] = MappingProxyType({})


class Loss(NamedTuple):
    """A rank that is not a member any more."""

    rank: int
    step: int
    """The one in which the others noticed; with backup workers they may have gone on without it
    long before.
    """
    why: str
    finished: bool = False
    """It closed its world in good order."""
    by: int | None = None
    """The rank that proposed to go on without it."""

    def __str__(self) -> str:
        return f"rank {self.rank} is lost, as the others noticed in step {self.step}: {self.why}"


class Generation(NamedTuple):
    """The live ranks, and from which step on they exchange with each other."""

    number: int
    members: Mapping[int, int]
    """By rank, in ascending order: the incarnation of its process, 0 for the first."""
    start: int = 0
    """The first training step that they exchange in; members of gossip train alone until then."""
    lost: tuple[Loss, ...] = ()
    """All ranks that are missing, in the order in which they were lost."""
    silent: tuple[int, ...] = ()
    """Members that live, but did not answer the roll call.

    They have no connections until they make one themselves.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return tuple(self.members)

    @property
    def connected(self) -> tuple[int, ...]:
        """The members that have connections to each other, in ascending order."""
        return tuple(rank for rank in self.members if rank not in self.silent)

    def successor(
        self,
        losses: Sequence[Loss],
        start: int,
        *,
        silent: Sequence[int] = (),
        joined: Mapping[int, int] = NOBODY,
    ) -> Generation:
        """The next generation: without the lost ranks, and with the new processes that have
        `joined`.
        """
        gone = {loss.rank for loss in losses}
        stay = {rank: incarnation for rank, incarnation in self.members.items() if rank not in gone}
        lost = tuple(loss for loss in (*self.lost, *losses) if loss.rank not in joined)
        members = dict(sorted({**stay, **joined}.items()))
        return Generation(self.number + 1, members, start, lost, tuple(silent))

    def changes_since(self, before: Generation) -> list[str]:
        """Return a sentence for each rank that was lost, replaced or silent since the generation
        `before`, or answers again.
        """
        changes = [str(loss) for loss in self.lost if loss not in before.lost]
        places = {*before.members, *(loss.rank for loss in before.lost)}
        for rank, process in self.members.items():
            if before.members.get(rank) == process:
                continue
            if rank in places:
                changes.append(f"a new process has the place of rank {rank}")
            else:
                changes.append(f"rank {rank} has come")
        silent = [rank for rank in self.silent if rank not in before.silent]
        changes += [f"rank {rank} does not answer, and is not waited for" for rank in silent]
        back = {*before.silent}.intersection(self.members).difference(self.silent)
        kept = [rank for rank in sorted(back) if self.members[rank] == before.members[rank]]
        return changes + [f"rank {rank} answers again" for rank in kept]
