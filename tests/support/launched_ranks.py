# SPDX-License-Identifier: Apache-2.0
"""Worker processes of test_launchers: each joins the world, adds up with the others, and reports what it saw.

``python launched_ranks.py FOLDER NUMBER WAY...``: ranks write to FOLDER; each adds NUMBER plus its rank. The ways are
`init`, and `gloo` and `commrt` for an init within a group of torch's with that backend.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import commrt.c10d


def report(number, start_timeout_s=60):
    """Of one world: rank, size, local rank, launcher, transport, and the sum of `number` plus the rank."""
    with commrt.init(min(30, start_timeout_s), start_timeout_s=start_timeout_s) as world:
        values = torch.full((8,), float(number + world.rank))
        world.run(commrt.Ring().schedule(0, world.size), values)
        (total,) = values.unique().tolist()
        return [world.rank, world.size, world.local_rank, world.launcher, world.transport.kind, total]


@contextmanager
def group(backend="gloo", **given):
    """Torch's; without more as its own launcher wants it."""
    dist.init_process_group(backend, **given)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_variables(tell, variables, *given):
    """As the launcher's process that has ``variables[rank]`` in place of torchrun's."""
    rank = _without_a_launcher()
    os.environ.update(variables[rank])
    return report(rank, *given)


def in_a_group(tell, method, size):
    """Of torch's, that no launcher made."""
    rank = _without_a_launcher()
    with group(init_method=method, rank=rank, world_size=size):
        return report(rank)


def _without_a_launcher():
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return rank


def main(folder, number, *ways):
    torch.set_num_threads(1)
    reports = []
    for way in ways:
        with nullcontext() if way == "init" else group(way):
            reports.append(report(int(number)))
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
