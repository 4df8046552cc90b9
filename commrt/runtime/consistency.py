# SPDX-License-Identifier: Apache-2.0
"""Checks that ranks make the same calls, before any data is sent: a mismatch that is noticed later is a hang.

A call of `World.run` is compared through the transport, by its *players* only: the ranks that send or receive in its
schedule. So a dead player is noticed at once, and other ranks need not come. What all ranks agree on (`World.agree`) is
compared through the store, or through the transport too where a rank may be lost meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.algorithms import tree
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.reference import mix_into, reduce_into
from commrt.membership.agreement import TOPIC, agree, announce_leaving, find_disagreement
from commrt.program import member_program
from commrt.runtime.elastic import Elastic
from commrt.runtime.executor import bind
from commrt.schedule import ADD, MIX, Schedule
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

__all__ = ["KEPT", "SCHEDULES_KEPT", "ConsistencyCheck"]

Comparison = Callable[[str, int, torch.dtype], None]
KEPT = 256
"""Comparisons that each set of players remembers: those used last."""
SCHEDULES_KEPT = 16
CLAIM_NBYTES = 128
"""Room for a digest, a number and the name of a dtype."""
SUMMARY = re.compile(r"[0-9a-f]{64} ([0-9]{1,9}) bytes")
"""Sent in place of a longer claim: its SHA-256 digest and its size."""
ODD = 1
"""One byte more in each message. Messages of sums have an even number, so neither is taken for the other."""


class _Traits(NamedTuple):
    """What a comparison needs of a schedule."""

    digest: str
    players: tuple[int, ...]
    combines: frozenset[int]


class ConsistencyCheck:
    """Compares calls of one rank with those of the others.

    Within one generation all players of a schedule make, remember and forget the same comparisons. A new generation
    remembers none: it may have a player that was not there before.
    """

    def __init__(self, transport: TransportByDevice, elastic: Elastic) -> None:
        self._transport, self._elastic = transport, elastic
        # Remembers schedules by object, and keeps them alive: no new one can come to lie at the address of an old one.
        self._traits = lru_cache(SCHEDULES_KEPT)(_traits)
        self._movable = lru_cache(KEPT)(self._require_movable)
        self._compared: dict[tuple[int, tuple[int, ...]], Comparison] = {}  # by generation and players
        self._compared_now: dict[tuple[int, tuple[int, ...]], Comparison] = {}  # on the communication thread
        self._latest = (0, 0)  # a generation, and the number of agreements in it

    def digest(self, schedule: Schedule) -> str:
        """Return `Schedule.digest`, remembered."""
        return self._traits(schedule).digest

    def require_same_call(self, schedule: Schedule, buffer: Tensor) -> None:
        """Raise `UsageError` if `schedule` cannot run on `buffer`, `DisagreementError` on all players that differ.

        On the training thread.
        """
        _require_row(buffer)
        self.require_players(schedule)
        traits = self._traits(schedule)
        self._movable(buffer.device, buffer.dtype, traits.combines)
        if self._transport.rank in traits.players:
            compare = self._remembered(self._compared, self._compare, traits.players)
            compare(traits.digest, buffer.numel(), buffer.dtype)

    def require_players(self, schedule: Schedule) -> None:
        """Raise `UsageError`, on all ranks alike, if `schedule` names a rank that is lost."""
        if lost := sorted({*self._traits(schedule).players} - {*self._elastic.generation.ranks}):
            raise UsageError(
                f"{schedule.name} names ranks {lost}, which are lost: build a schedule for the ranks that are left, "
                "with schedule.over(world.members, world=world.size)"
            )

    def require_same_buffers_now(
        self, schedule: Schedule, players: tuple[int, ...], numel: int, dtype: torch.dtype
    ) -> None:
        """Raise `DisagreementError` on all `players` if they differ. On the communication thread."""
        self._remembered(self._compared_now, self._compare_now, players)(self.digest(schedule), numel, dtype)

    def require_same_schedule_now(self, digest: str, players: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on all `players` if their schedules differ. On the communication thread."""
        if difference := _difference(players, self._gather(digest, players, step)):
            raise DisagreementError(
                f"step {step}: {difference}. An algorithm must make its schedule from the step, the number of ranks, "
                "and fields that are equal on every rank"
            )

    def agree(self, store: Store, topic: str, claim: Mapping[str, str]) -> None:
        """Return once all members made the same `claim`; see `agreement.agree`. On the training thread."""
        elastic = self._elastic
        if elastic.is_elastic:
            text = json.dumps({TOPIC: topic, **claim}, sort_keys=True)
            claims = elastic.together(lambda: elastic.submit(lambda: self._claims_now(text)).result())
            self._latest = self._next()
            if error := find_disagreement(topic, {rank: _parse_claim(said) for rank, said in claims.items()}):
                raise error
            return
        self._latest = self._next()
        members, timeout_s = elastic.generation.ranks, self._transport.timeout_s
        agree(store, self._transport.rank, members, topic, claim, timeout_s, self.latest_key)

    @property
    def latest_key(self) -> str:
        """A prefix of keys on the store that belongs to the latest agreement; the same on all ranks."""
        return _key(self._latest)

    def end_next_agreement(self, store: Store, reason: BaseException) -> None:
        """Tell the other ranks that this rank will not come to the next agreement."""
        announce_leaving(PrefixStore(_key(self._next()), store), self._transport.rank, reason)

    def _next(self) -> tuple[int, int]:
        """Counted anew in each generation: no lost rank can reach it, and a new process counts like the others."""
        generation, (latest, number) = self._elastic.generation.number, self._latest
        return generation, number + 1 if generation == latest else 1

    def _require_movable(self, device: torch.device, dtype: torch.dtype, combines: frozenset[int]) -> None:
        self._transport.allocate(0, dtype, device)  # raises for a device or dtype that it cannot move
        _require_arithmetic(dtype, combines)

    def _remembered(
        self,
        compared: dict[tuple[int, tuple[int, ...]], Comparison],
        compare: Callable[..., None],
        players: tuple[int, ...],
    ) -> Comparison:
        """Return `compare` for `players`, which does nothing for arguments that it was called with before."""
        generation = self._elastic.generation.number
        if (generation, players) not in compared:
            for other in [key for key in compared if key[0] != generation]:
                compared.pop(other, None)
            compared[generation, players] = lru_cache(KEPT)(partial(compare, players))
        return compared[generation, players]

    def _compare(self, players: Sequence[int], digest: str, numel: int, dtype: torch.dtype) -> None:
        claim = f"{digest} {numel} {dtype}"
        self._require_equal(players, self._elastic.submit(lambda: self._gather(claim, players)).result())

    def _compare_now(self, players: Sequence[int], digest: str, numel: int, dtype: torch.dtype) -> None:
        self._require_equal(players, self._gather(f"{digest} {numel} {dtype}", players))

    def _require_equal(self, players: Sequence[int], claims: Sequence[str]) -> None:
        if difference := _difference(players, claims):
            raise DisagreementError(
                f"run: {difference}. The buffer was not sent; make the same calls in the same order on every rank, "
                "with as many elements of one dtype"
            )

    def _claims_now(self, claim: str) -> dict[int, str]:
        """Return what each member claims, or equal texts if all claim the same. On the communication thread.

        For a member that makes another call, it returns what that call sends.
        """
        members, data = self._elastic.generation.ranks, claim.encode()
        texts = self._gather(f"{hashlib.sha256(data).hexdigest()} {len(data)} bytes", members)
        summaries = [SUMMARY.fullmatch(text) for text in texts]
        if len({*texts}) > 1 and None not in summaries:
            texts = self._gather(claim, members, row_nbytes=max(int(each[1]) for each in summaries if each))
        elif len({*texts}) > 1:
            texts = [text if each is None else claim for text, each in zip(texts, summaries, strict=True)]
        return dict(zip(members, texts, strict=True))

    def _gather(self, claim: str, players: Sequence[int], step: int = 0, row_nbytes: int = CLAIM_NBYTES) -> list[str]:
        """Return what each player claims, in order. On the communication thread."""
        message = torch.zeros(len(players) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = message[:-ODD].view(-1, row_nbytes)
        data = torch.tensor(list(claim.encode()), dtype=torch.uint8, device="cpu")
        rows[players.index(self._transport.rank), : len(data)] = data
        mine = member_program(_undivided_all_reduce(len(players)), players, self._transport.rank, self._transport.ranks)
        bind(mine, message, self._transport).run(Tag(step, "comparison"))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


@lru_cache
def _undivided_all_reduce(ranks: int) -> Schedule:
    return tree.reduce(ranks).then(tree.broadcast(ranks), "comparison")


def _traits(schedule: Schedule) -> _Traits:
    players: set[int] = set()
    combines: set[int] = set()
    for step in schedule.checked_steps():
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
    """Raise `UsageError` if torch cannot do on `dtype` what receivers do: try it on one element."""
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
    """Return which player first differs from the first one, and in what; None if all are equal."""
    for rank, claim in zip(players, claims, strict=True):
        if claim != claims[0]:
            pairs = zip(("schedule", "numel", "dtype"), claim.split(), claims[0].split(), strict=False)
            what, ours, theirs = next((pair for pair in pairs if pair[1] != pair[2]), ("the call", claim, claims[0]))
            return f"rank {rank} disagrees with rank {players[0]} about {what}: {ours} against {theirs}"
    return None


def _parse_claim(text: str) -> dict[str, str]:
    """Return the fields of a claim of `agree`; the whole text as its topic if it is none."""
    try:
        return {name: str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {TOPIC: text}


def _key(agreement: tuple[int, int]) -> str:
    return "agreement {}.{}".format(*agreement)
