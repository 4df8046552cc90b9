# SPDX-License-Identifier: Apache-2.0
"""Let the stand-in for NCCL cut groups into plans, as NCCL does, so that a group that hangs there hangs here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import nccl_stand_in as nccl
from nccl_plans import Call, Rules, cut

__all__ = ["cutting"]


@contextmanager
def cutting(rules: Rules) -> Iterator[None]:
    """Run the groups of all ranks of this process plan by plan, cut by `rules`.

    A plan's calls begin together, and the next plan begins when they have ended. As in NCCL, nothing compares groups:
    the k-th send from one rank to another meets the k-th receive there.
    """
    before = nccl.run_group

    def run_group(calls: Sequence[nccl.Posted], _: Mapping[tuple[nccl.NcclCommunicator, int], int]) -> None:
        for communicator in dict.fromkeys(call.communicator for call in calls):
            for plan in _plans([call for call in calls if call.communicator is communicator], rules):
                _play(communicator, plan)

    nccl.run_group = run_group
    try:
        yield
    finally:
        nccl.run_group = before


def _plans(calls: Sequence[nccl.Posted], rules: Rules) -> Iterator[list[nccl.Posted]]:
    """Yield the calls of a rank with itself, which are in no plan, and those of each plan."""
    rank, ranks = calls[0].communicator.rank_id(), calls[0].communicator.fabric.ranks
    yield [call for call in calls if call.peer == rank]
    shapes = [Call(call.peer, call.is_send, call.count * nccl.NBYTES[call.dtype]) for call in calls]
    for plan in cut(rank, ranks, shapes, rules):
        yield [calls[number] for number in sorted(plan.calls)]


def _play(communicator: nccl.NcclCommunicator, calls: Sequence[nccl.Posted]) -> None:
    """Begin all `calls`, and wait until they have ended."""
    with nccl.changed, nccl.exclusively({communicator}):
        ends = [_begin(communicator, call) for call in calls]
        nccl.changed.wait_for(lambda: all(end.done for end in ends) or not communicator.comm)
        statuses = [end.status if end.done else nccl.REMOTE_ERROR for end in ends]
    for status in filter(None, statuses):
        raise nccl.NcclError(status)


def _begin(communicator: nccl.NcclCommunicator, call: nccl.Posted) -> nccl.End:
    """Let `call` meet its other end if that has begun; otherwise it waits."""
    rank, end = communicator.rank_id(), nccl.End(call)
    pair = (rank, call.peer) if call.is_send else (call.peer, rank)
    waiting = communicator.fabric.waiting.setdefault(pair, deque())
    if not waiting or waiting[0].call.is_send == call.is_send:
        waiting.append(end)
        return end
    other = waiting.popleft()
    send, recv = (end, other) if call.is_send else (other, end)
    end.status = other.status = nccl.transfer([send.call], [recv.call])
    end.done = other.done = True
    nccl.changed.notify_all()
    return end
