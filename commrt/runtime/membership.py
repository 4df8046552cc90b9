# SPDX-License-Identifier: Apache-2.0
"""The ranks of a world, what it asks of an attached model, and checks that ranks make the same calls.

Here the ranks stay the same; `commrt.elastic` has a membership that goes on without lost ranks.

Calls are compared before any data is sent: a mismatch that is noticed later is a hang. A call of `World.run` is
compared through the transport, by its *ranks* only: the ranks that send or receive in its schedule. So a dead rank is
noticed at once, and other ranks need not come. What all ranks agree on (`World.agree`) is compared in the same way by
all members.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from commrt.algorithms import tree
from commrt.errors import (
    DeadlineExceeded,
    DisagreementError,
    PeerLost,
    ScheduleError,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.program import member_program
from commrt.runtime.executor import bind
from commrt.schedule import Schedule
from commrt.store.agreement import TOPIC, find_disagreement
from commrt.threads.comm_thread import CommThread, RecoveredError
from commrt.threads.future import Future
from commrt.transport.protocol import Tag, TransportByDevice

T = TypeVar("T")
RunNow = Callable[[Tensor], object]
"""Overwrites a tensor, on the communication thread."""
Begin = Callable[[], RunNow]
"""Checks on the training thread what concerns this rank alone. What all ranks refuse alike is for the other thread."""
LOST = (PeerLost, DeadlineExceeded, TransportClosed)
"""Errors that may mean that a rank is lost. All others are errors of this rank, or of the program."""
REFUSALS = (UsageError, DisagreementError, ScheduleError)
"""Errors of a collective after which the world goes on."""
CLAIM_NBYTES = 128
"""Room for a digest, a number and the name of a dtype."""
SUMMARY = re.compile(r"[0-9a-f]{64} ([0-9]{1,9}) bytes")
"""Sent in place of a longer claim: its SHA-256 digest and its size."""
ODD = 1
"""One byte more in each message. Messages of sums have an even number, so neither is taken for the other."""
COMPARISON = Tag(0, "comparison")


@dataclass(slots=True)
class Hooks:
    """Functions of the attached model that its world calls, on the training thread. By default they do nothing."""

    before_collective: Callable[[], None] = lambda: None
    when_all_came: Callable[[], None] = lambda: None
    """To a collective, before its work begins."""
    before_close: Callable[[], None] = lambda: None
    """Only if the world has not failed."""
    before_leave: Callable[[], None] = lambda: None
    """Later in `World.close`: no task runs any more, and the other ranks still count on this process."""
    on_collective_error: Callable[[BaseException], None] = lambda _: None


NO_HOOKS = Hooks()


class Loss(NamedTuple):
    """A rank that is not a member any more."""

    rank: int
    step: int
    """The one in which the others noticed; with backup workers they may have gone on without it long before."""
    why: str
    finished: bool = False
    """It closed its world in good order."""
    by: int | None = None
    """The rank that proposed to go on without it."""

    def __str__(self) -> str:
        return f"rank {self.rank} is lost, as the others noticed in step {self.step}: {self.why}"


class Membership:
    """All ranks of a world, for as long as it lives: a lost rank ends it."""

    is_elastic = False
    """True if a lost rank does not end this world; the same on all ranks."""
    needed = 0
    """So many ranks make a step of backup workers; 0 without them."""
    number = 0
    """Of the generation whose connections this rank uses."""
    lost: tuple[Loss, ...] = ()
    memory_epoch = 0
    """Grows when memory that was sent from must be left alone: a broken peer may still read it."""

    def __init__(self, ranks: Collection[int], comm_thread: CommThread) -> None:
        self._all, self._comm_thread = tuple(ranks), comm_thread
        self.next_step = 0
        """The first step in which this rank has not exchanged; gossip and the ring shuffle count it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return self._all

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on the communication thread; ``result()`` raises what ended it."""
        return self._comm_thread.submit(task)

    def begin_call(self, begin: Begin, tensor: Tensor, residual: Tensor | None, *, at_once: bool) -> Future[Any] | None:
        """Let what `begin` returns overwrite `tensor`, and `residual` too; return None if that is done.

        All members do so, on the training thread, in a `collective`. If possible that thread does it `at_once`.
        """
        run_now, comm_thread = begin(), self._comm_thread
        return (comm_thread.run if at_once else comm_thread.submit)(lambda: run_now(tensor))

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which all members do. On the training thread, in a `collective`."""
        return work()

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Run the body as the collective `what` of all members. On the training thread."""
        return nullcontext()

    def takes_part(self, step: int) -> bool:
        """Return True if this rank exchanges in training step `step`."""
        return True

    def recover(self, failure: TransportError) -> None:
        """Go on without a lost rank after `failure`, or raise it. On the communication thread."""
        raise failure

    def any_gone(self, ranks: Collection[int]) -> bool:
        """Return True if one of `ranks` is lost and the others go on. On the training thread."""
        return False

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank; from any thread, and safe to call twice."""

    def end_membership(self, why: str, *, finished: bool = False) -> None:
        """Tell the others that this rank goes on without them, because of `why`. On the training thread."""

    def wait_for_all_closed(self) -> None:
        """Stay until all others have ended the membership too; the process that holds the store calls it."""

    def close(self) -> None:
        """Release the store; call it after `end_membership`."""


def count_kept(count: Callable[[], int]) -> int:
    """Return ``count()`` of models, without those that only wait to be collected: a model and its hooks are a cycle."""
    for pause_s in (0.0, 0.01, 0.1):
        if count():
            Event().wait(pause_s)  # while another thread collects, this one would not
            gc.collect()
    return count()


class ConsistencyCheck:
    """Compares what ranks do, before they do it. Methods called ``..._now`` are for the communication thread."""

    def __init__(self, transport: TransportByDevice) -> None:
        self._transport = transport

    def require_same_call_now(self, claim: tuple[Sequence[int], str], *_: object) -> None:
        """Fail with a `DisagreementError` on all ranks of a `claim` if one claims another call; the world goes on."""
        ranks, call = claim
        if difference := _difference(self._gather(call, ranks)):  # any error of `_gather` is of this rank alone
            raise RecoveredError(
                DisagreementError(
                    f"run: {difference}. The buffer was not sent; make the same calls in the same order on every rank, "
                    "with as many elements of one dtype"
                )
            )

    def require_same_schedule_now(self, digest: str, ranks: Sequence[int], step: int) -> None:
        """Raise `DisagreementError` on all `ranks` if their schedules differ."""
        if difference := _difference(self._gather(digest, ranks, Tag(step, "comparison"))):
            raise DisagreementError(
                f"step {step}: {difference}. An algorithm must make its schedule from the step, the number of ranks, "
                "and fields that are equal on every rank"
            )

    def agree(self, membership: Membership, topic: str, claim: Mapping[str, str]) -> None:
        """Return once all members made the same `claim`; raise `DisagreementError` on all. On the training thread."""
        text, tag = json.dumps({TOPIC: topic, **claim}, sort_keys=True), Tag(0, topic)
        claims = membership.together(
            lambda: membership.submit(lambda: self._claims_now(membership.ranks, tag, text)).result()
        )
        if error := find_disagreement(topic, {rank: _parse_claim(text) for rank, text in claims.items()}):
            raise error

    def _claims_now(self, members: Sequence[int], tag: Tag, claim: str) -> dict[int, str]:
        """Return what the first member claims, and the first one that differs; of another call, what that sends."""
        data = claim.encode()
        texts = self._gather(f"{hashlib.sha256(data).hexdigest()} {len(data)} bytes", members, tag)
        first, other = members[0], next((rank for rank in members if texts[rank] != texts[members[0]]), members[0])
        summaries = {rank: SUMMARY.fullmatch(text) for rank, text in texts.items()}
        if first != other and None not in summaries.values():
            longest = max(int(each[1]) for each in summaries.values() if each)
            texts = self._gather(claim, members, tag, (first, other), longest)
        elif first != other:
            texts = {rank: text if summaries[rank] is None else claim for rank, text in texts.items()}
        return {first: texts[first], other: texts[other]}

    def _gather(
        self,
        claim: str,
        ranks: Sequence[int],
        tag: Tag = COMPARISON,
        writers: Sequence[int] = (),
        row_nbytes: int = CLAIM_NBYTES,
    ) -> dict[int, str]:
        writers = writers or ranks
        message = torch.zeros(len(writers) * row_nbytes + ODD, dtype=torch.uint8, device="cpu")
        rows = dict(zip(writers, message[:-ODD].view(-1, row_nbytes), strict=True))
        if self._transport.rank in rows:
            data = torch.tensor(list(claim.encode()), dtype=torch.uint8, device="cpu")
            rows[self._transport.rank][: len(data)] = data
        mine = member_program(_undivided_all_reduce(len(ranks)), ranks, self._transport.rank, self._transport.places)
        bind(mine, message, self._transport).run(tag)
        return {rank: bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for rank, row in rows.items()}


@lru_cache
def _undivided_all_reduce(ranks: int) -> Schedule:
    return tree.reduce(ranks).then(tree.broadcast(ranks), "comparison")


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
