# SPDX-License-Identifier: Apache-2.0
"""Tries commrt with several versions of Python and torch, on CPUs, and prints the table of
``docs/versions.md``.

    python dev/versions.py 3.11:2.9.1 3.13:2.14.1    # into build/versions; 3 to 7 GB each
    python dev/versions.py /path/to/bin/python    # has torch, numpy and packaging

Without arguments it takes `CELLS`. Each check runs in two processes of its own: what ends one of
them by a signal stands in the table. Exits with 1 if a check fails.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

CELLS = ("3.11:2.9.1", "3.11:2.13.0", "3.11:newest", "3.13:2.9.1", "3.13:newest")
"""Python and torch: the oldest, one between, and the newest that pip finds."""
NEEDS = ("numpy", "packaging")
HOUSE = Path(__file__).resolve().parents[1]
RANKS = 2
LIMIT_S = 150


def init_without_a_launcher() -> None:
    """Open a world as ``mpirun`` and people do, whose store rank 0 holds."""
    import torch

    import commrt

    with commrt.init(timeout_s=60) as world:
        tensor = torch.full((3,), float(world.rank + 1))
        world.all_reduce(tensor, "sum")
        assert tensor.tolist() == [3.0] * 3


def attach_each_way_to_train() -> None:
    """Train two steps with each way; replicas end equal."""
    import torch

    import commrt

    ways = (
        commrt.Torus2D(),
        commrt.Gossip(),
        commrt.LocalSGD(period=1),
        commrt.BackupWorkers(backups=0),
    )
    with commrt.init(timeout_s=60) as world:
        for way in ways:
            torch.manual_seed(world.rank)
            model = torch.nn.Linear(5, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            replica = commrt.attach(model, optimizer, algorithm=way, world=world)
            for _ in range(2):
                model(torch.randn(4, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            replica.consolidate()
            assert replica.replicas_equal()
            replica.detach()


def collectives_as_over_gloo() -> None:
    """Compare the collectives of the backend, in the default group and in another, with those of
    Gloo.
    """
    import torch
    import torch.distributed as dist

    import commrt.c10d  # noqa: F401  # registers the backend

    dist.init_process_group("commrt")
    rank = dist.get_rank()

    def results(group: dist.ProcessGroup) -> list[object]:
        mine = torch.arange(4.0) + rank
        one = torch.zeros(2)
        two = torch.zeros(8)
        parts = [torch.zeros(4) for _ in range(RANKS)]
        objects = [None] * RANKS
        dist.all_gather(parts, mine, group=group)
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        dist.all_gather_into_tensor(two, mine, group=group)
        dist.reduce_scatter_tensor(one, mine.clone(), group=group)
        swapped = torch.zeros(4)
        dist.all_to_all_single(swapped, mine, group=group)
        dist.all_reduce(mine, group=group)
        dist.broadcast(mine[:2], 1, group=group)
        other = torch.zeros(4)
        sending = dist.isend(mine + rank, 1 - rank, group=group)
        dist.recv(other, 1 - rank, group=group)
        sending.wait()
        dist.barrier(group=group)
        return [
            mine.tolist(),
            one.tolist(),
            two.tolist(),
            swapped.tolist(),
            other.tolist(),
            str(parts),
            objects,
        ]

    expected = results(dist.new_group(backend="gloo"))
    another = dist.new_group()
    assert results(dist.group.WORLD) == results(another) == expected
    dist.destroy_process_group()


def ddp_as_over_gloo() -> None:
    """Train DDP on both backends; the parameters end equal."""
    import torch
    import torch.distributed as dist

    import commrt.c10d  # noqa: F401  # registers the backend

    dist.init_process_group("commrt")
    ends = []
    for group in (dist.new_group(backend="gloo"), dist.group.WORLD):
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(5, 3), process_group=group
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        ends.append([parameter.tolist() for parameter in model.parameters()])
    assert ends[0] == ends[1]
    dist.destroy_process_group()


def what_torch_reads_of_the_backend() -> None:
    """Read what torch's C++ reads, with its flight recorder on: a property that is missing fills
    the stack.
    """
    import torch
    import torch.distributed as dist

    import commrt.c10d  # noqa: F401  # registers the backend

    dist.init_process_group("commrt")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    native = torch._C._distributed_c10d.Backend
    for name, value in vars(native).items():
        if isinstance(backend, native) and isinstance(value, property) and name != "mem_allocator":
            value.__get__(backend)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 2
    dist.destroy_process_group()


CHECKS: tuple[Callable[[], None], ...] = (
    init_without_a_launcher,
    attach_each_way_to_train,
    collectives_as_over_gloo,
    ddp_as_over_gloo,
    what_torch_reads_of_the_backend,
)


def run_rank(name: str) -> None:
    """Run one check as a rank of it."""
    try:
        next(check for check in CHECKS if check.__name__ == name)()
    except BaseException:  # so that the other rank need not wait for this one's threads
        traceback.print_exc()
        os._exit(1)


def outcome(python: str, name: str) -> str:
    """Return "right", or what went wrong with a check under this interpreter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    env = (
        os.environ
        | found
        | {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(HOUSE),
            "OMP_NUM_THREADS": "1",
        }
    )
    call = [python, str(Path(__file__).resolve()), "--rank-of", name]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            call, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr=pipe, text=True
        )
        for r in range(RANKS)
    ]
    try:
        texts = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, texts, strict=True):
        if rank.returncode:
            print(text, file=sys.stderr)
        if rank.returncode < 0:
            return signal.Signals(-rank.returncode).name
    return "right" if not any(rank.returncode for rank in ranks) else "**wrong**"


def interpreter(cell: str) -> str:
    """Return the interpreter of a cell, in an environment that is made for it if it is not there
    yet.
    """
    if os.sep in cell:
        return cell
    python, torch = cell.split(":")
    at = HOUSE / "build" / "versions" / cell.replace(":", "-torch-")
    if not (at / "ready").exists():
        subprocess.run([f"python{python}", "-m", "venv", "--clear", str(at)], check=True)
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        pip = [str(at / "bin/pip"), "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, wanted, *NEEDS], check=True)
        (at / "ready").touch()
    return str(at / "bin/python")


def main(cells: list[str]) -> int:
    """Print the table of all cells; return 1 if a check fails."""
    heads = [check.__name__.replace("_", " ") for check in CHECKS]
    print("| Python | torch |", " | ".join(heads), "|")
    print("|---" * (len(heads) + 2) + "|")
    failed = False
    for cell in cells:
        python = interpreter(cell)
        ask = "import platform, torch; print(platform.python_version(), '|', torch.__version__)"
        versions = subprocess.run(
            [python, "-c", ask], check=True, capture_output=True, text=True
        ).stdout.strip()
        found = [outcome(python, check.__name__) for check in CHECKS]
        print(f"| {versions} |", " | ".join(found), "|", flush=True)
        failed |= any(each != "right" for each in found)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:] or [*CELLS]))
