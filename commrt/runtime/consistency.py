# SPDX-License-Identifier: Apache-2.0
"""Checks that ranks make the same calls, before any data is sent: a mismatch that is noticed later is a hang.

A call of `World.run` is compared through the transport, by its *ranks* only: the ranks that send or receive in its
schedule. So a dead rank is noticed at once, and other ranks need not come. What all ranks agree on (`World.agree`) is
compared in the same way by all members.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms import tree
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.reference import mix_into, reduce_into
from commrt.program import member_program
from commrt.proof.replay import ends_alike
from commrt.runtime.executor import bind
from commrt.runtime.membership import Membership
from commrt.schedule import ADD, MIX, Schedule
from commrt.store.agreement import TOPIC, find_disagreement
from commrt.threads.comm_thread import RecoveredError
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

__all__ = ["KEPT", "SCHEDULES_KEPT", "ConsistencyCheck"]

Compared = dict[tuple[int, tuple[int, ...]], set[str]]
"""What the ranks of a generation have compared, by both."""
KEPT = 256
"""Comparisons that each set of ranks remembers."""
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
    ranks: tuple[int, ...]
    combines: frozenset[int]


class ConsistencyCheck:
    """Compares calls of one rank with those of the others.

    Within one generation all ranks of a schedule make, remember and forget the same comparisons. A new generation
    remembers none: it may have a rank that was not there before.
    """

    def __init__(self, transport: TransportByDevice, membership: Membership) -> None:
        self._transport, self.membership = transport, membership
        # Remembers schedules by object, and keeps them alive: no new one can come to lie at the address of an old one.
        self._traits = lru_cache(SCHEDULES_KEPT)(_traits)
        self._alike = lru_cache(SCHEDULES_KEPT)(ends_alike)
        self._movable = lru_cache(KEPT)(self._require_movable)
        self._compared: Compared = {}  # on the communication thread, whose order is the same on all ranks

    def digest(self, schedule: Schedule) -> str:
        """Return `Schedule.digest`, remembered."""
        return self._traits(schedule).digest

    def require_possible(self, schedule: Schedule, buffer: Tensor) -> None:
        """Raise `UsageError` if `schedule` cannot run on `buffer`. On any thread."""
        _require_row(buffer)
        self.require_present(schedule)
        self._movable(buffer.device, buffer.dtype, self._traits(schedule).combines)

    def compared(self, schedule: Schedule, run_now: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
        """Return `run_now` for the communication thread, where it fails before it begins if ranks' calls differ.

        It fails on all ranks alike: with a `DisagreementError`, or a `UsageError` if chunks differ and that matters.
        """

        def run_same(buffer: Tensor) -> None:
            self._require_same_call_now(schedule, buffer)
            run_now(buffer)

        return run_same

    def _require_same_call_now(self, schedule: Schedule, buffer: Tensor) -> None:
        traits = self._traits(schedule)
        if self._transport.rank not in traits.ranks:
            return
        claim = f"{traits.digest} {buffer.numel()} {buffer.dtype}"
        try:
            self._compare_once(traits.ranks, claim)
        except DisagreementError as refusal:  # any other error is of this rank alone
            raise RecoveredError(refusal) from refusal
        try:
            self._require_equal_chunks(schedule, buffer)
        except UsageError as refusal:
            raise RecoveredError(refusal) from refusal

    def _require_equal_chunks(self, schedule: Schedule, buffer: Tensor) -> None:
        numel, chunks = buffer.numel(), schedule.chunks
        if numel % chunks and not self._alike(schedule):
            raise UsageError(
                f"run: {numel} elements do not divide into {chunks} equal chunks, which {schedule.name} needs: pad the "
                f"buffer to {-(-numel // chunks) * chunks} elements"
            )

    def require_present(self, schedule: Schedule) -> None:
        """Raise `UsageError`, on all ranks alike, if `schedule` names a rank that is lost."""
        if lost := sorted({*self._traits(schedule).ranks} - {*self.membership.ranks}):
            raise UsageError(
                f"{schedule.name} names ranks {lost}, which are lost: build a schedule for the ranks that are left, "
                "with schedule.over(world.members, world=world.size)"
            )

    def require_same_buffers_now(self, schedule: Schedule, ranks: tuple[int, ...], numel: int, travels: str) -> None:
        """Raise `DisagreementError` on all `ranks` if they differ. On the communication thread."""
        claim = f"{self.digest(schedule)} {numel} {travels}"
        self._compare_once(ranks, claim)

    def require_same_schedule_now(self, digest: str, ranks: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on all `ranks` if their schedules differ. On the communication thread."""
        if difference := _difference(self._gather(digest, ranks, Tag(step, "comparison"))):
            raise DisagreementError(
                f"step {step}: {difference}. An algorithm must make its schedule from the step, the number of ranks, "
                "and fields that are equal on every rank"
            )

    def agree(self, topic: str, claim: Mapping[str, str]) -> None:
        """Return once all members made the same `claim`; raise `DisagreementError` on all. On the training thread."""
        membership, text = self.membership, json.dumps({TOPIC: topic, **claim}, sort_keys=True)
        claims = membership.together(lambda: membership.submit(lambda: self._claims_now(Tag(0, topic), text)).result())
        if error := find_disagreement(topic, {rank: _parse_claim(text) for rank, text in claims.items()}):
            raise error

    def _require_movable(self, device: torch.device, dtype: torch.dtype, combines: frozenset[int]) -> None:
        self._transport.allocate(0, dtype, device)  # raises for a device or dtype that it cannot move
        _require_arithmetic(dtype, combines)

    def _compare_once(self, ranks: tuple[int, ...], claim: str) -> None:
        """Raise `DisagreementError` unless all ranks make the same `claim`, or made it before in this generation."""
        generation = self.membership.number
        for key in [key for key in self._compared if key[0] != generation]:
            del self._compared[key]
        known = self._compared.setdefault((generation, ranks), set())
        if claim in known:
            return
        if difference := _difference(self._gather(claim, ranks)):
            raise DisagreementError(
                f"run: {difference}. The buffer was not sent; make the same calls in the same order on every rank, "
                "with as many elements of one dtype"
            )
        if len(known) == KEPT:  # all ranks forget at the same call
            known.clear()
        known.add(claim)

    def _claims_now(self, tag: Tag, claim: str) -> dict[int, str]:
        """Return what the first member claims, and the first one that differs. On the communication thread.

        For a member that makes another call, it returns what that call sends.
        """
        members, data = self.membership.ranks, claim.encode()
        texts = self._gather(f"{hashlib.sha256(data).hexdigest()} {len(data)} bytes", members, tag)
        first, other = members[0], next((rank for rank in members if texts[rank] != texts[members[0]]), members[0])
        summaries = {rank: SUMMARY.fullmatch(text) for rank, text in texts.items()}
        if first != other and None not in summaries.values():
            texts = self._gather(
                claim, members, tag, (first, other), max(int(each[1]) for each in summaries.values() if each)
            )
        elif first != other:
            texts = {rank: text if summaries[rank] is None else claim for rank, text in texts.items()}
        return {first: texts[first], other: texts[other]}

    def _gather(
        self,
        claim: str,
        ranks: Sequence[int],
        tag: Tag = Tag(0, "comparison"),  # noqa: B008  # a frozen value
        writers: Sequence[int] = (),
        row_nbytes: int = CLAIM_NBYTES,
    ) -> dict[int, str]:
        """Return what each rank claims, or each of `writers`. On the communication thread."""
        writers = writers or ranks
        message = torch.zeros(len(writers) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = dict(zip(writers, message[:-ODD].view(-1, row_nbytes), strict=True))
        if self._transport.rank in rows:
            data = torch.tensor(list(claim.encode()), dtype=torch.uint8, device="cpu")
            rows[self._transport.rank][: len(data)] = data
        mine = member_program(_undivided_all_reduce(len(ranks)), ranks, self._transport.rank, self._transport.ranks)
        bind(mine, message, self._transport).run(tag)
        return {rank: bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for rank, row in rows.items()}


@lru_cache
def _undivided_all_reduce(ranks: int) -> Schedule:
    return tree.reduce(ranks).then(tree.broadcast(ranks), "comparison")


def _traits(schedule: Schedule) -> _Traits:
    ranks: set[int] = set()
    combines: set[int] = set()
    for step in schedule.checked_steps():
        moved = step.canonical()
        ranks.update(chain(moved.src.tolist(), moved.dst.tolist()))
        combines.update(moved.combine.tolist())
    return _Traits(schedule.digest(), tuple(sorted(ranks)), frozenset(combines))


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


def _difference(claims: Mapping[int, str]) -> str | None:
    """Return which rank first differs from the first one, and in what; None if all are equal."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        if claim != expected:
            pairs = zip(("schedule", "numel", "dtype"), claim.split(), expected.split(), strict=False)
            what, ours, theirs = next((pair for pair in pairs if pair[1] != pair[2]), ("the call", claim, expected))
            return f"rank {rank} disagrees with rank {first} about {what}: {ours} against {theirs}"
    return None


def _parse_claim(text: str) -> dict[str, str]:
    """Return the fields of a claim of `agree`; the whole text as its topic if it is none."""
    try:
        return {name: str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {TOPIC: text}
