# SPDX-License-Identifier: Apache-2.0
"""Launch a meeting on a GPU: one warp, with arguments that never change."""

from __future__ import annotations

import torch

from commrt.kernels.device import variants
from commrt.kernels.device.launch import Bound, launch_of
from commrt.kernels.meeting import MeetingPlan

__all__ = ["meet_launch"]


def meet_launch(plan: MeetingPlan) -> Bound:
    """Return a launch of the meeting of `plan`; see `meet_kernel`."""
    device, peers = plan.state.device, len(plan.needs)
    rows = (plan.outboxes, plan.inboxes, plan.counts)
    tables = [torch.tensor([word.data_ptr() for word in row], device=device) for row in rows]
    needs = torch.tensor([*plan.needs, *plan.ranks], dtype=torch.int32, device=device)
    memory = (*tables, needs, plan.state, plan.host)
    arguments = (*(part.data_ptr() for part in memory), plan.position, plan.last, plan.number, int(plan.looks))
    return Bound(launch_of(variants.meet(peers), device), 1, arguments, (*memory, *rows))
