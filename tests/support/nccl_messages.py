# SPDX-License-Identifier: Apache-2.0
"""Messages ``(source, target, nbytes)`` as calls of NCCL, and in the groups in which the transport sends them."""

from __future__ import annotations

from collections import defaultdict
from itertools import repeat

import numpy as np
from nccl_plans import Call

from commrt.program import joined, nccl_groups
from commrt.schedule import COPY, Step


def group_of(messages, ranks):
    """Return what each rank calls for ``(source, target, nbytes)``."""
    groups = [[] for _ in range(ranks)]
    for source, target, nbytes in messages:
        groups[source].append(Call(target, True, nbytes))
        groups[target].append(Call(source, False, nbytes))
    return groups


def messages_of(step, nbytes):
    """Return a message of `nbytes` for each transfer of `step`."""
    return [(one, other, nbytes) for one, other in zip(step.src.tolist(), step.dst.tolist(), strict=True)]


def step_of(messages):
    """Return a step in which the k-th message has chunk 2k."""
    lo = 2 * np.arange(len(messages))
    return Step.of([one for one, _, _ in messages], [other for _, other, _ in messages], lo, lo + 1, COPY).canonical()


def in_groups(messages, ranks):
    """Return lists of messages, one for each group in which they are sent, in order."""
    step, found = step_of(messages), defaultdict(list)
    groups = nccl_groups(step, ranks)
    for number, group in zip((step.lo // 2).tolist(), repeat(0) if groups is None else groups.tolist(), strict=False):
        nbytes = messages[number][2]
        found[(0, 0) if groups is None else joined(group, nbytes)].append(messages[number])
    return [found[key] for key in sorted(found)]
