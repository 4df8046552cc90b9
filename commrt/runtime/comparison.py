# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to do; those who differ learn it before anything moves.

Claims travel as an all-reduce of bytes: each rank writes its own row of zeros. Nothing is kept, and
nothing of a world changes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from commrt.algorithms import tree
from commrt.errors import (
    DisagreementError,
)
from commrt.program import member_program
from commrt.runtime.executor import bind
from commrt.runtime.generation import Members
from commrt.runtime.membership import Membership
from commrt.schedule import Schedule
from commrt.store.disagreement import TOPIC, find_disagreement
from commrt.threads.comm_thread import RecoveredError
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

CLAIM_NBYTES = 128
"""Room for a digest, a number and the name of a dtype."""

SUMMARY = re.compile(r"[0-9a-f]{64} ([0-9]{1,9}) bytes")
"""Sent in place of a longer claim: its SHA-256 digest and its size."""

ODD = 1
"""One byte more in each message.

Messages of sums have an even number, so neither is taken for the other.
"""

COMPARISON = Tag(0, "comparison")


class Claim(NamedTuple):
    """What `ranks` compare before an exchange of theirs runs for the first time."""

    ranks: Members
    text: str


class ConsistencyCheck:
    """Compares what ranks do, before they do it. All is collective among the ranks that are named.

    Methods called ``..._now`` are for the communication thread, or one that has its turn; `agree`
    is for the training thread.
    """

    def __init__(self, transport: TransportByDevice) -> None:
        self._transport = transport

    def require_same_call_now(self, claim: Claim) -> None:
        """Fail with `DisagreementError` on all ranks of `claim` if they differ; the world goes on.

        Any other error may be of this rank alone, so it ends the world.
        """
        if difference := _difference(self._gather(claim.text, claim.ranks)):
            raise RecoveredError(
                DisagreementError(
                    f"run: {difference}. The buffer was not sent; make the same calls in the same"
                    " order on every rank, with as many elements of one dtype"
                )
            )

    def require_same_schedule_now(self, digest: str, ranks: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on all `ranks` if their schedules differ."""
        if difference := _difference(self._gather(digest, ranks, Tag(step, "comparison"))):
            raise DisagreementError(
                f"step {step}: {difference}. An algorithm must make its schedule from the step, the"
                " number of ranks, and fields that are equal on every rank"
            )

    def agree(self, membership: Membership, topic: str, claim: Mapping[str, str]) -> None:
        """Return once all members made the same `claim`; raise `DisagreementError` on all."""
        text = json.dumps({TOPIC: topic, **claim}, sort_keys=True)
        tag = Tag(0, topic)
        claims = membership.together(
            lambda: membership.submit(
                lambda: self._claims_now(membership.ranks, tag, text)
            ).result()
        )
        if error := find_disagreement(
            topic, {rank: _parse_claim(text) for rank, text in claims.items()}
        ):
            raise error

    def _claims_now(self, members: Sequence[int], tag: Tag, claim: str) -> dict[int, str]:
        """Return the first claim and the first that differs; of another call, its message.

        All send summaries of equal size. If two differ, those two ranks send their claims.
        """
        data = claim.encode()
        texts = self._gather(f"{hashlib.sha256(data).hexdigest()} {len(data)} bytes", members, tag)
        first = members[0]
        other = next((rank for rank in members if texts[rank] != texts[first]), first)
        if other == first:
            return {first: texts[first]}
        summaries = {rank: SUMMARY.fullmatch(text) for rank, text in texts.items()}
        if None in summaries.values():  # a rank compares something else, and sends no claim next
            texts = {
                rank: text if summaries[rank] is None else claim for rank, text in texts.items()
            }
        else:
            longest = max(int(each[1]) for each in summaries.values() if each)
            texts = self._gather(claim, members, tag, (first, other), longest)
        return {first: texts[first], other: texts[other]}

    def _gather(
        self,
        claim: str,
        ranks: Sequence[int],
        tag: Tag = COMPARISON,
        writers: Sequence[int] = (),
        row_nbytes: int = CLAIM_NBYTES,
    ) -> dict[int, str]:
        """Return what each of `writers`, by default all `ranks`, claims; all `ranks` come."""
        writers = writers or ranks
        message = torch.zeros(len(writers) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = dict(zip(writers, message[:-ODD].view(-1, row_nbytes), strict=True))
        if self._transport.rank in rows:
            data = torch.tensor(list(claim.encode()), dtype=torch.uint8, device="cpu")
            rows[self._transport.rank][: len(data)] = data
        mine = member_program(
            _undivided_all_reduce(len(ranks)), ranks, self._transport.rank, self._transport.places
        )
        bind(mine, message, self._transport).run(tag)
        return {
            rank: bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            for rank, row in rows.items()
        }


@lru_cache
def _undivided_all_reduce(ranks: int) -> Schedule:
    return tree.reduce(ranks).then(tree.broadcast(ranks), "comparison")


def _difference(claims: Mapping[int, str]) -> str | None:
    """Return which rank first differs from the first one, and in what; None if all are equal."""
    (first, expected), *others = claims.items()
    for rank, claim in others:
        if claim != expected:
            pairs = zip(
                ("schedule", "numel", "dtype"), claim.split(), expected.split(), strict=False
            )
            what, ours, theirs = next(
                (pair for pair in pairs if pair[1] != pair[2]), ("the call", claim, expected)
            )
            return f"rank {rank} disagrees with rank {first} about {what}: {ours} against {theirs}"
    return None


def _parse_claim(text: str) -> dict[str, str]:
    """Return the fields of a claim of `agree`; the whole text as its topic if it is none."""
    try:
        return {name: str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {TOPIC: text}
