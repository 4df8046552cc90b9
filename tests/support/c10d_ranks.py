# SPDX-License-Identifier: Apache-2.0
"""Runs many checks on the same ranks of torch.distributed, to start processes only once."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import commrt.c10d  # noqa: F401  # it registers the backend
from commrt.testing.processes import run_processes

TIMEOUT = timedelta(seconds=60)
LIMIT_S = 100.0


def answers(size, *bodies, backend="commrt"):
    """What each of `bodies` returns on each rank: {its name: [by rank]}. What it raises stands there as a text."""
    outcomes = run_processes(size, run_all, backend, *bodies, limit_s=LIMIT_S, holds_store=True)
    assert [outcome.error for outcome in outcomes] == [None] * size
    assert [outcome.exit_code for outcome in outcomes] == [0] * size
    return {body.__name__: [outcome.value[body.__name__] for outcome in outcomes] for body in bodies}


def run_all(tell, backend, *bodies):
    """On each rank: {name: what it returns} for each of `bodies`, in one default group."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        return {body.__name__: answer(body) for body in bodies}
    finally:
        dist.destroy_process_group()


def answer(body):
    try:
        return body()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}"
