# SPDX-License-Identifier: Apache-2.0
"""Messages ``(source, target, nbytes)``: random ones, as calls of NCCL, and in commrt's groups."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from nccl_plans import Call, Rules, cut  # of this folder

from commrt.nccl_groups import joined, nccl_groups
from commrt.schedule import COPY, Step
from commrt.transport.message_groups import uncut
from commrt.transport.protocol import P2PGroup, P2PMessage

__all__ = [
    "LARGE", "Groups", "Message", "fits_a_kernel", "group_of", "in_groups", "messages_of", "mixed", "posted_in_groups",
    "several",
]  # fmt: skip

Message = tuple[int, int, int]
Groups = list[list[Call]]
"""By rank, its calls in one group."""
LARGE = 1 << 26
SIZES = (1000, 1 << 18, 1 << 22, LARGE)


def several(seed: int, ranks: int, count: int) -> list[Message]:
    """Return up to `count` messages of random sizes; most pairs have several of them."""
    draw = random.Random(seed)
    pairs = ((draw.randrange(ranks), draw.randrange(ranks)) for _ in range(count))
    return [(one, other, draw.choice(SIZES)) for one, other in pairs if one != other]


def mixed(seed: int, ranks: int, density: float = 1.0) -> list[Message]:
    """Return one message of a random size from each rank to a part of the others."""
    draw = random.Random(seed)
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    return [(*pair, draw.choice(SIZES)) for pair in pairs if draw.random() < density]


def messages_of(step: Step, nbytes: int) -> list[Message]:
    """Return a message of `nbytes` for each transfer of `step`."""
    return [(one, other, nbytes) for one, other in zip(step.src.tolist(), step.dst.tolist(), strict=True)]


def group_of(messages: Sequence[Message], ranks: int) -> Groups:
    """Return what each rank calls if all `messages` are one group."""
    groups: Groups = [[] for _ in range(ranks)]
    for source, target, nbytes in messages:
        groups[source].append(Call(target, True, nbytes))
        groups[target].append(Call(source, False, nbytes))
    return groups


def fits_a_kernel(groups: Groups, rules: Rules) -> bool:
    """Return True if no rank's calls are cut."""
    return all(len(cut(rank, len(groups), calls, rules)) == 1 for rank, calls in enumerate(groups))


def in_groups(messages: Sequence[Message], ranks: int) -> list[list[Message]]:
    """Return the groups in which a schedule's step with these messages is sent, in order."""
    lo = 2 * np.arange(len(messages))
    sources, targets, _ = zip(*messages, strict=True)
    step = Step.of(sources, targets, lo, lo + 1, COPY).canonical()
    if (groups := nccl_groups(step, ranks)) is None:
        return [list(messages)]
    found = defaultdict(list)
    for number, group in zip((step.lo // 2).tolist(), groups.tolist(), strict=True):
        found[joined(group, messages[number][2])].append(messages[number])
    return [found[key] for key in sorted(found)]


def posted_in_groups(messages: Sequence[Message], ranks: int) -> list[list[list[Call]]]:
    """Return by rank the groups in which it sends and receives messages that it posted without a schedule, in order."""
    found = []
    for rank in range(ranks):
        sends = [_posted(target, nbytes) for source, target, nbytes in messages if source == rank]
        recvs = [_posted(source, nbytes) for source, target, nbytes in messages if target == rank]
        groups = uncut(P2PGroup(sends, recvs), rank, range(ranks))
        found.append([_calls(group) for group in groups])
    return found


def _posted(peer: int, nbytes: int) -> P2PMessage:
    return P2PMessage(peer, torch.empty(nbytes, dtype=torch.uint8, device="meta"))


def _calls(group: P2PGroup) -> list[Call]:
    sends = [Call(each.peer, True, each.data.nbytes) for each in group.sends]
    return sends + [Call(each.peer, False, each.data.nbytes) for each in group.recvs]
