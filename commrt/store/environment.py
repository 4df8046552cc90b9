# SPDX-License-Identifier: Apache-2.0
"""commrt's own environment variables; training reads those of the process through here only.

Reads on the thread that asks, each time anew; writes and keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from commrt.threads.deadline import DEFAULT_TIMEOUT_S, require_deadlines

ENVIRONMENT: Mapping[str, str] = os.environ
"""What functions of `store` and `transport` read if they are given no other variables."""
VARIABLES = (
    "COMMRT_CLUSTER",  # name or file of the cluster for which the backend chooses schedules
    "COMMRT_LIVE",  # 1: ranks tell on the store how they get on, and rank 0 logs who is late
    "COMMRT_NVTX",  # 1: ranges for Nsight
    "COMMRT_SAME_BITS",  # 1: the backend adds in order of ranks, whatever that costs
    "COMMRT_SCHEDULES",  # schedules to take whatever they cost, such as "all_reduce=ring"
    "COMMRT_TIMEOUT_S",
    "COMMRT_TRACE",  # a directory: each rank writes its timeline there when it ends
    "COMMRT_TRANSPORT",
)
"""All that are commrt's own."""


def variable(name: str) -> str:
    """Return an environment variable, one of commrt's, Gloo's or NCCL's; empty if it is not set."""
    return ENVIRONMENT.get(name, "")


def is_on(name: str) -> bool:
    """Return True if a variable such as COMMRT_NVTX is set, and not to 0."""
    return variable(name) not in {"", "0"}


def default_timeout_s(env: Mapping[str, str] = ENVIRONMENT) -> float:
    """Return the deadline of every wait in seconds: COMMRT_TIMEOUT_S, or 300."""
    timeout_s: Any = env.get("COMMRT_TIMEOUT_S", DEFAULT_TIMEOUT_S)
    with suppress(ValueError):
        timeout_s = float(timeout_s)
    require_deadlines(COMMRT_TIMEOUT_S=timeout_s)
    return float(timeout_s)
