# SPDX-License-Identifier: Apache-2.0
"""Which messages travel in one NCCL group: pure functions, which agree on all ranks.

`commrt.nccl_groups` has given numbers to the messages of schedules; others are numbered here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from commrt.nccl_groups import MOST_MESSAGES, joined
from commrt.transport.protocol import P2PGroup, P2PMessage


def uncut(group: P2PGroup, rank: int, members: Sequence[int]) -> list[P2PGroup]:
    """Return the messages of `group` as groups that NCCL never cuts, in one order on all `members`.

    A hop's messages say where they belong. Many without a schedule, as of ``batch_isend_irecv``,
    are sent by distance.
    """
    count = len(group.sends) + len(group.recvs)
    if count > MOST_MESSAGES and all(each.group is None for each in (*group.sends, *group.recvs)):
        group = _by_distance(group, members.index(rank), members)
    found = defaultdict[tuple[int, int], tuple[list[P2PMessage], list[P2PMessage]]](
        lambda: ([], [])
    )
    for side, messages in enumerate((group.sends, group.recvs)):
        for each in messages:
            key = (0, 0) if each.group is None else joined(each.group, each.data.nbytes)
            found[key][side].append(each)
    in_order = sorted(found.items(), key=itemgetter(0))
    return [replace(group, sends=sends, recvs=recvs) for _, (sends, recvs) in in_order]


def _by_distance(group: P2PGroup, index: int, members: Sequence[int]) -> P2PGroup:
    """Return the messages in groups that both ends know: pairs' first ones, then second, ..."""

    def grouped(messages: Sequence[P2PMessage], sign: int) -> Iterator[P2PMessage]:
        before: Counter[int] = Counter()  # messages of each peer
        for each in messages:
            of_distance = sign * (members.index(each.peer) - index) % len(members) // MOST_MESSAGES
            yield each._replace(
                group=before[each.peer] * (len(members) // MOST_MESSAGES + 1) + of_distance
            )
            before[each.peer] += 1

    return replace(group, sends=[*grouped(group.sends, 1)], recvs=[*grouped(group.recvs, -1)])
