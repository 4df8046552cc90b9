# SPDX-License-Identifier: Apache-2.0
"""Worker processes of test_launchers: each joins the world, adds up with the others, and reports what it saw.

``python launched_ranks.py FOLDER NUMBER WAY...``: ranks write to FOLDER; each adds NUMBER plus its rank. The ways are
`init`, and `group` for an init within a group of torch's.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import commrt

__all__ = ["in_a_group", "report", "with_variables"]


def report(number, start_timeout_s=60):
    """Of one world, from its beginning to its end; what is added up is `number` plus the rank."""
    with commrt.init(min(30, start_timeout_s), start_timeout_s=start_timeout_s) as world:
        values = torch.full((8,), float(number + world.rank))
        world.run(commrt.Ring().schedule(0, world.size), values)
        return {
            "place": [world.rank, world.size, world.local_rank],
            "launcher": world.launcher,
            "kind": world.transport.kind,
            "sum": values.unique().tolist(),
        }


@contextmanager
def group():
    """Torch's, as its own launcher wants it."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_variables(tell, variables, *given):
    """As the launcher's process that has ``variables[rank]`` in place of torchrun's."""
    rank = _without_a_launcher()
    os.environ.update(variables[rank])
    return report(float(rank), *given)


def in_a_group(tell, method, size):
    """Of torch's, that no launcher made."""
    rank = _without_a_launcher()
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    try:
        return report(float(rank))
    finally:
        dist.destroy_process_group()


def _without_a_launcher():
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return rank


def main(folder, number, *ways):
    torch.set_num_threads(1)
    reports = []
    for way in ways:
        if way == "group":
            with group():
                reports.append(report(float(number)))
        else:
            reports.append(report(float(number)))
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
