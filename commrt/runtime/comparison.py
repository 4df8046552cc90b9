# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they are about to do; those who differ learn it before anything moves.

They compare texts, which travel as an all-reduce of bytes: each rank has a row for its text, and
zeros in those of the others.
Nothing is kept, and nothing of a world changes. `ConsistencyCheck` says which thread calls what.
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
from commrt.errors import DisagreementError, UsageError
from commrt.program import member_program
from commrt.runtime.executor import bind
from commrt.runtime.generation import Members
from commrt.runtime.membership import Membership
from commrt.schedule import Schedule
from commrt.store.disagreement import TOPIC, find_disagreement
from commrt.threads.comm_thread import RecoveredError
from commrt.transport.by_device import TransportByDevice
from commrt.transport.protocol import Tag

TEXT_NBYTES = 128
"""Room for a digest, a number and the name of a dtype or wire (`wire_text`), or for a summary."""

SUMMARY = re.compile(r"[0-9a-f]{64} ([0-9]{1,9}) bytes")
"""Sent at first in place of what `agree` compares: its SHA-256 digest and its size."""

ODD = 1
"""One byte more in each message.

Messages of sums have an even number, so neither is taken for the other.
"""

COMPARISON = Tag(0, "comparison")


class Claim(NamedTuple):
    """What `ranks` compare before an exchange of theirs runs for the first time."""

    ranks: Members
    text: str
    """At most `TEXT_NBYTES`."""


class ConsistencyCheck:
    """Compares what ranks do, before they do it. All is collective among the ranks that are named.

    Methods called ``..._now`` are for the communication thread, or the caller's in its place;
    `agree` is for the training thread, or a callback.
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

    def agree(self, membership: Membership, topic: str, text: str) -> None:
        """Return once all came with this `claim_text`; raise `DisagreementError` on all."""
        tag = Tag(0, topic)
        texts = membership.together(
            lambda: membership.submit(
                lambda: self._differing_texts_now(membership.ranks, tag, text)
            ).result()
        )
        if error := find_disagreement(
            topic, {rank: _parse_fields(text) for rank, text in texts.items()}
        ):
            raise error

    def _differing_texts_now(self, members: Sequence[int], tag: Tag, own: str) -> dict[int, str]:
        """Return the text of the first member, and of one that differs, if any; this rank has
        `own`.

        All send summaries of equal size. If two differ, those two ranks send their texts. A rank
        that compares something else instead has sent what that is, and comes no more. Then `own`
        stands for the other of the two, as both do what this rank does.
        """
        data = own.encode()
        sent = self._gather(f"{hashlib.sha256(data).hexdigest()} {len(data)} bytes", members, tag)
        first = members[0]
        other = next((rank for rank in members if sent[rank] != sent[first]), first)
        if other == first:
            return {first: sent[first]}
        summaries = {rank: SUMMARY.fullmatch(text) for rank, text in sent.items()}
        if None not in summaries.values():
            longest = max(int(each[1]) for each in summaries.values() if each)
            return self._gather(own, members, tag, (first, other), longest)
        if summaries[first] is not None:
            other = next(rank for rank in members if summaries[rank] is None)
        return {rank: sent[rank] if summaries[rank] is None else own for rank in (first, other)}

    def _gather(
        self,
        text: str,
        ranks: Sequence[int],
        tag: Tag = COMPARISON,
        writers: Sequence[int] = (),
        row_nbytes: int = TEXT_NBYTES,
    ) -> dict[int, str]:
        """Return the `text` of each of `writers`, by default of all `ranks`; all `ranks` come."""
        writers = writers or ranks
        message = torch.zeros(len(writers) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = dict(zip(writers, message[:-ODD].view(-1, row_nbytes), strict=True))
        if self._transport.rank in rows:
            data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
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


def _difference(texts: Mapping[int, str]) -> str | None:
    """Return which rank first differs from the first one, and in what; None if all are equal."""
    (first, expected), *others = texts.items()
    for rank, text in others:
        if text != expected:
            pairs = zip(
                ("schedule", "numel", "dtype"), text.split(), expected.split(), strict=False
            )
            what, ours, theirs = next(
                (pair for pair in pairs if pair[1] != pair[2]), ("the call", text, expected)
            )
            return f"rank {rank} disagrees with rank {first} about {what}: {ours} against {theirs}"
    return None


def claim_text(topic: str, fields: Mapping[str, object]) -> str:
    """Return what ranks compare of `fields` about `topic`; raises `UsageError` for no text."""
    try:
        return json.dumps({TOPIC: topic, **fields}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"ranks cannot compare {fields!r:.80}: give strings ({error})") from error


def _parse_fields(text: str) -> dict[str, str]:
    """Return the fields in a text of `agree`; another text as a topic."""
    try:
        return {name: str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return {TOPIC: text}
