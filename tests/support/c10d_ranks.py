# SPDX-License-Identifier: Apache-2.0
"""Runs many checks in one group of torch.distributed."""

import sys
from datetime import timedelta

import torch.distributed as dist

import commrt.c10d  # noqa: F401  # it registers the backend

TIMEOUT = timedelta(seconds=60)
LIMIT_S = 100.0


def answers(pool, *bodies, backend="commrt", size=None):
    """What each of `bodies` returns on each rank: {its name: [by rank]}. What it raises stands there as a text."""
    values = pool.values(run_all, backend, *bodies, size=size, limit_s=LIMIT_S)
    return {body.__name__: [value[body.__name__] for value in values] for body in bodies}


def run_all(tell, backend, *bodies):
    """On each rank: {name: what it returns} for each of `bodies`, in one default group."""
    dist.init_process_group(backend, timeout=TIMEOUT)
    return {body.__name__: answer(body) for body in bodies}


def answer(body):
    try:
        return body()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}"
