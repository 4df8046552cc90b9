# SPDX-License-Identifier: Apache-2.0
"""Measure all-reduces within a host beside MPI and Gloo: ``python bench/beside_mpi.py``; needs mpiexec and mpi4py.

All ways run interleaved in one job of MPI. A turn makes calls one after the other, and gives the mean time of a call
on the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from socket import create_server
from typing import Any

import torch
import torch.distributed as dist
from interleaved import table
from records import append, made
from step_worker import HOST, in_turns

import commrt
from commrt import c10d

SIZES = {"8 B": 8, "4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20, "25 MB": 25 << 20}
MPI = "MPI"
WAYS = (MPI, "world.all_reduce", "backend commrt", "Gloo")
CALLS, NBYTES_PER_TURN = 50, 32 << 20
"""The most calls and bytes of a turn."""


def ways(comm: Any, in_place: Any, world: commrt.World, group: Any, tensor: torch.Tensor) -> list[Callable[[], object]]:
    """Return what sums `tensor` in each of `WAYS`."""
    array = tensor.numpy()
    return [
        lambda: comm.Allreduce(in_place, array),
        lambda: world.all_reduce(tensor, "sum"),
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.all_reduce(tensor),
    ]


def work(rounds: int, records: Path | None) -> None:
    """Do what a rank does, which mpiexec has started; rank 0 tells."""
    from mpi4py import MPI as mpi  # noqa: N811, PLC0415  # only here

    comm = mpi.COMM_WORLD
    torch.set_num_threads(1)
    own = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.rank, "LOCAL_WORLD_SIZE": comm.size}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group("gloo")
    with commrt.init() as world:
        group = dist.new_group(backend=c10d.NAME)
        for size, nbytes in SIZES.items():
            calls = dict(zip(WAYS, ways(comm, mpi.IN_PLACE, world, group, torch.zeros(nbytes // 4)), strict=True))
            times = in_turns(calls, rounds, max(1, min(CALLS, NBYTES_PER_TURN // nbytes)))
            if comm.rank == 0:
                print(f"{size}, {comm.size} ranks\n{table(times, dict.fromkeys(WAYS, MPI), 'us')}\n", flush=True)
                append(records, made("beside MPI", f"{size}, {comm.size} ranks", times, dict.fromkeys(WAYS, MPI)))
        dist.destroy_process_group()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--records", type=Path, help="append records to this file, as JSON lines")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        work(options.rounds, options.records)
        return
    found = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None or find_spec("mpi4py") is None:
        print("left out: install mpich and mpi4py (pip install mpich mpi4py)")
        return
    for ranks in options.ranks:
        with create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
        more = ["--records", str(options.records)] * (options.records is not None)
        command = [found, "-n", str(ranks), sys.executable, __file__, "--rank", "--rounds", str(options.rounds), *more]
        env = os.environ | {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    main()
