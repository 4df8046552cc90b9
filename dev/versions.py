# SPDX-License-Identifier: Apache-2.0
"""Tries commrt with several versions of Python and torch, on CPUs, and prints the table of
``docs/versions.md``.

    python dev/versions.py 3.11:2.9.1 3.13:2.14.1    # into build/versions; 3 to 7 GB each
    python dev/versions.py /path/to/bin/python    # has torch, numpy and packaging
    python dev/versions.py --index http://localhost:8000 3.12:newest    # see CONTRIBUTING.md

Without versions it takes `CELLS`. With an index of packages, each environment installs
`commrt[cli]` by name and sees nothing of this checkout; without one, it uses the checkout. Each
check runs in two processes of its own: what ends one of them by a signal stands in the table. Exits
with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CELLS = tuple(
    f"{python}:{torch}" for python in ("3.11", "3.12", "3.13") for torch in ("2.9.0", "newest")
)
"""Python and torch: the oldest, and the newest that pip finds."""
NEEDS = ("numpy", "packaging")
HOUSE = Path(__file__).resolve().parents[1]
RANKS = 2
LIMIT_S = 600
STEPS = 10


def init_without_a_launcher() -> None:
    """Open a world as ``mpirun`` and people do, whose store rank 0 holds."""
    import torch

    import commrt

    with commrt.init(timeout_s=60) as world:
        tensor = torch.full((3,), float(world.rank + 1))
        world.all_reduce(tensor, "sum")
        assert tensor.tolist() == [3.0] * 3


def attach_each_way_to_train() -> None:
    """Train ten steps with each way; replicas end equal."""
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
            for _ in range(STEPS):
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
    """Train ten steps of DDP on both backends; the parameters end equal."""
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
        for _ in range(STEPS):
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


def outcome(python: str, name: str, env: Mapping[str, str]) -> str:
    """Return "right", or what went wrong with a check under this interpreter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "TORCH_FR_BUFFER_SIZE": "2000",  # the flight recorder
    }
    call = [python, str(Path(__file__).resolve()), "--rank-of", name]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            call, env={**env, **found, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=pipe, text=True
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


def install(python: str, index: str) -> None:
    """Install this version of commrt by name, and check that its command is there."""
    text = (HOUSE / "commrt" / "__init__.py").read_text()
    version = re.search(r'__version__ = "(.*)"', text)[1]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--extra-index-url", index]
    subprocess.run([*pip, "--force-reinstall", "--no-deps", f"commrt=={version}"], check=True)
    subprocess.run([*pip, f"commrt[cli]=={version}"], check=True)
    said = subprocess.run(
        [Path(python).with_name("commrt"), "--version"], check=True, capture_output=True, text=True
    )
    assert said.stdout.split()[-1] == version, said.stdout


def main(cells: Sequence[str], index: str | None) -> int:
    """Print the table of all cells; return 1 if a check fails."""
    heads = [check.__name__.replace("_", " ") for check in CHECKS]
    print("| Python | torch |", " | ".join(heads), "|")
    print("|---" * (len(heads) + 2) + "|")
    failed = False
    env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = "" if index else str(HOUSE)
    for cell in cells:
        python = interpreter(cell)
        if index:
            install(python, index)
        ask = "import platform, torch; print(platform.python_version(), '|', torch.__version__)"
        versions = subprocess.run(
            [python, "-c", ask], check=True, capture_output=True, text=True
        ).stdout.strip()
        found = [outcome(python, check.__name__, env) for check in CHECKS]
        print(f"| {versions} |", " | ".join(found), "|", flush=True)
        failed |= any(each != "right" for each in found)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--index", help="The address of an index of packages, with commrt.")
        parser.add_argument("cells", nargs="*", default=CELLS)
        given = parser.parse_args()
        sys.exit(main(given.cells, given.index))
