# SPDX-License-Identifier: Apache-2.0
"""May this schedule run on this buffer, and do the ranks that play it mean the same? Asked before its first transfer.

Asked on the transport and not on the store: a player that is gone is noticed at once, and ranks that do not play
need not come.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms import tree
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.mix import mix_into
from commrt.kernels.reduce import reduce_into
from commrt.program import among
from commrt.runtime.executor import bind
from commrt.schedule import ADD, MIX, Schedule
from commrt.threads.answer import Pending
from commrt.transport.media import Media
from commrt.transport.protocol import Moment

__all__ = ["KEPT", "Comparison"]

Submit = Callable[[Callable[[], list[str]]], Pending[list[str]]]
"""Runs a task on the lane."""
Once = Callable[[str, int, torch.dtype], None]
Among = dict[tuple[int, tuple[int, ...]], Once]
"""By generation and players."""
KEPT = 256
"""Comparisons that are remembered for each set of players, of those used last."""
SCHEDULES_KEPT = 16
CLAIM_NBYTES = 128
"""Room for a digest, a number and the name of a dtype."""
MARK = re.compile(r"[0-9a-f]{64} ([0-9]{1,9}) bytes")
"""Of a longer claim."""
ODD = 1
"""A byte more in all messages, of which those of sums have an even number: neither is taken for the other."""


class _Traits(NamedTuple):
    """What matters of a schedule here."""

    digest: str
    players: tuple[int, ...]
    """The ranks that send or receive."""
    combines: frozenset[int]


class Comparison:
    """What one rank has compared with others; in one generation players make, remember and forget the same calls."""

    def __init__(self, transport: Media, submit: Submit) -> None:
        self._transport = transport
        self._submit = submit
        # Keeps the schedules: a new one cannot come to lie at the address of one that is remembered.
        self._traits = lru_cache(SCHEDULES_KEPT)(_traits)
        self._movable = lru_cache(KEPT)(self._require_movable)
        self._among: Among = {}
        self._among_now: Among = {}

    def require(self, schedule: Schedule, buffer: Tensor, members: Collection[int], generation: int = 0) -> None:
        """Raise `UsageError` if `schedule` cannot run on `buffer`, `DisagreementError` if its players differ.

        `members` are left. What was compared in another `generation` is not remembered: there may be a player that was
        not there.
        """
        _require_row(buffer)
        traits = self._traits(schedule)
        if lost := sorted({*traits.players} - {*members}):
            raise UsageError(
                f"{schedule.name} names ranks {lost}, which are lost: let those that are left play a schedule for as "
                "many, with schedule.over(world.members, world=world.size)"
            )
        self._movable(buffer.device, buffer.dtype, traits.combines)
        if self._transport.rank in traits.players:
            compare = self._once(self._among, self._compare, traits.players, generation)
            compare(traits.digest, buffer.numel(), buffer.dtype)

    def require_same_buffers_now(
        self, schedule: Schedule, players: tuple[int, ...], numel: int, dtype: torch.dtype, generation: int
    ) -> None:
        """As `require` of all `players`, on the lane."""
        self._once(self._among_now, self._compare_now, players, generation)(self.digest(schedule), numel, dtype)

    def digest(self, schedule: Schedule) -> str:
        """`Schedule.digest`, remembered."""
        return self._traits(schedule).digest

    def _require_movable(self, device: torch.device, dtype: torch.dtype, combines: frozenset[int]) -> None:
        self._transport.allocate(0, dtype, device)  # refuses what it cannot move
        _require_arithmetic(dtype, combines)

    def _once(self, among: Among, compare: Callable[..., None], players: tuple[int, ...], generation: int) -> Once:
        """`compare`, which remembers what those `players` agreed about in this `generation`."""
        if (generation, players) not in among:
            for other in [key for key in among if key[0] != generation]:
                among.pop(other, None)
            among[generation, players] = lru_cache(KEPT)(partial(compare, players))
        return among[generation, players]

    def _compare(self, players: Sequence[int], digest: str, numel: int, dtype: torch.dtype) -> None:
        claim = f"{digest} {numel} {dtype}"
        self._require_equal(players, self._submit(lambda: self._gather(claim, players)).result())

    def _compare_now(self, players: Sequence[int], digest: str, numel: int, dtype: torch.dtype) -> None:
        self._require_equal(players, self._gather(f"{digest} {numel} {dtype}", players))

    def _require_equal(self, players: Sequence[int], claims: Sequence[str]) -> None:
        if difference := _difference(players, claims):
            raise DisagreementError(
                f"run: {difference}. The buffer was not sent; make the same calls in the same order on every rank, "
                "with as many elements of one dtype"
            )

    def require_same_now(self, digest: str, players: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on every player if their schedules differ; on the lane, by players only."""
        if difference := _difference(players, self._gather(digest, players, step)):
            raise DisagreementError(
                f"step {step}: {difference}. What an algorithm returns must follow from the step, the number of ranks, "
                "and fields that are equal on every rank"
            )

    def claims_now(self, claim: str, players: Sequence[int]) -> list[str]:
        """What each player claims, in any number of bytes; or equal words if all claim the same. On the lane.

        Of one that asks for something else, the words with which it asks.
        """
        said = claim.encode()
        marks = self._gather(f"{hashlib.sha256(said).hexdigest()} {len(said)} bytes", players)
        found = [MARK.fullmatch(mark) for mark in marks]
        if len({*marks}) == 1 or None in found:
            return [mark if other is None else claim for mark, other in zip(marks, found, strict=True)]
        return self._gather(claim, players, row_nbytes=max(int(other[1]) for other in found if other))

    def _gather(self, claim: str, players: Sequence[int], step: int = 0, row_nbytes: int = CLAIM_NBYTES) -> list[str]:
        """What each player claims; on the lane."""
        message = torch.zeros(len(players) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = message[:-ODD].view(-1, row_nbytes)
        said = torch.tensor(list(claim.encode()), dtype=torch.uint8, device="cpu")
        rows[players.index(self._transport.rank), : len(said)] = said
        mine = among(_of_whole_messages(len(players)), players, self._transport.rank, self._transport.ranks)
        bind(mine, message, self._transport).run(Moment(step, "comparison"))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


@lru_cache
def _of_whole_messages(ranks: int) -> Schedule:
    """An all-reduce that never divides the buffer."""
    return tree.reduce(ranks).then(tree.broadcast(ranks), "comparison")


def _traits(schedule: Schedule) -> _Traits:
    players: set[int] = set()
    combines: set[int] = set()
    for step in schedule.played():
        moved = step.canonical()
        players.update(chain(moved.src.tolist(), moved.dst.tolist()))
        combines.update(moved.combine.tolist())
    return _Traits(schedule.digest(), tuple(sorted(players)), frozenset(combines))


def _require_row(buffer: Tensor) -> None:
    if not isinstance(buffer, Tensor):
        raise UsageError(f"a buffer must be a tensor, not a {type(buffer).__name__}: make one with torch.tensor()")
    if buffer.layout != torch.strided or buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(
            f"a buffer must be one contiguous row, not {buffer.layout} of shape {tuple(buffer.shape)}, perhaps with "
            "gaps: flatten it first"
        )
    if buffer.is_inference():
        raise UsageError(
            "the buffer was made under torch.inference_mode() and cannot be written: clone() it outside of that"
        )


def _require_arithmetic(dtype: torch.dtype, combines: frozenset[int]) -> None:
    """Raise `UsageError` if torch cannot do on `dtype` what receivers do: tried on one element."""
    try:
        own, received = torch.zeros(2, 1, dtype=dtype, device="cpu")
        own.copy_(received)
        if ADD in combines:
            reduce_into(own, [received])
        if MIX in combines:
            mix_into(own, received, 0.5)
    except RuntimeError as error:
        raise UsageError(f"this schedule cannot run on {dtype} ({error}): convert the buffer first") from error


def _difference(players: Sequence[int], claims: Sequence[str]) -> str | None:
    """Who differs first from the first player, and in what."""
    rank, claim = next(((p, said) for p, said in zip(players, claims, strict=True) if said != claims[0]), (0, None))
    if claim is None:
        return None
    pairs = zip(("schedule", "numel", "dtype"), claim.split(), claims[0].split(), strict=False)
    what, ours, theirs = next((pair for pair in pairs if pair[1] != pair[2]), ("the call", claim, claims[0]))
    return f"rank {rank} disagrees with rank {players[0]} about {what}: {ours} against {theirs}"
