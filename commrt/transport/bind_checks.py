# SPDX-License-Identifier: Apache-2.0
"""What every transport does first with a group: refuse what is out of reach, part own messages.

Pure functions of the group, for any thread. They copy nothing: the transport copies when the group
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.transport.protocol import P2PGroup


def require_cpu(device: torch.device) -> None:
    """Raise `UsageError` for a `device` that a transport of host memory cannot reach."""
    if device.type != "cpu":
        raise UsageError(
            f"this transport moves CPU tensors, not those on {device}: move them to the CPU"
        )


def split_self(
    group: P2PGroup, rank: int, members: Sequence[int]
) -> tuple[P2PGroup, list[tuple[Tensor, Tensor]]]:
    """Return `group` without messages to itself, and those as (source, target) pairs to copy.

    Drops empty messages, since both ends know that they are empty. Raises `UsageError` for a rank
    outside `members`, and for a message to itself without its other end.
    """
    strangers = sorted(peer for peer in group.peers if peer not in members)
    if strangers:
        whole = list(members) == list(range(len(members)))
        known = f"0..{len(members) - 1}" if whole else ", ".join(map(str, members))
        raise UsageError(
            f"hop {group.hop} names ranks {strangers}, but there are only ranks {known}"
        )
    own_sends, own_recvs = (
        [m.data for m in side if m.peer == rank] for side in (group.sends, group.recvs)
    )
    if [len(data) for data in own_sends] != [len(data) for data in own_recvs]:
        raise UsageError(
            f"hop {group.hop}: rank {rank} sends itself {len(own_sends)} messages and receives"
            f" {len(own_recvs)}, or their sizes differ: put each send to itself and its receive in"
            " the same group"
        )
    sends, recvs = (
        [m for m in side if m.peer != rank and m.data.numel()]
        for side in (group.sends, group.recvs)
    )
    return replace(group, sends=sends, recvs=recvs), list(zip(own_sends, own_recvs, strict=True))
