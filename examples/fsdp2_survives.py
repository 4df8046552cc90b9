# SPDX-License-Identifier: Apache-2.0
r"""FSDP2 that goes on: a killed rank costs one step, and a new process joins (torch 2.14 and
later).

::

    torchrun --standalone --nproc-per-node 4 --no-python \
        examples/launch/replace.sh python examples/fsdp2_survives.py --kill-rank 3

The shards of a dead rank are lost, so train several replicas (HSDP), whose ranks are rows of a
mesh. A death breaks one row. The rest forms a new mesh, and a row that is whole gives the state to
all: it gathers its shards on rank 0 once, which needs the memory there. If no row is whole, all
ranks exit with code 75: start again from a checkpoint.

Nobody updates its shards before all have their gradients. If a rank dies at that moment, some ranks
may have made the step: the others have their gradients, and make it before they give their shards.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import defaultdict
from datetime import timedelta
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_survives import batches
from meeting import Meeting, Member, latest_first
from mnist.dataset import lenet, load
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import commrt.c10d

TIMEOUT = timedelta(seconds=60)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Place(NamedTuple):
    """Where a process was in the mesh of a turn."""

    turn: int
    row: int
    shards: int
    column: int


class LostError(RuntimeError):
    """No row has all its shards."""


def whole_row(members: list[Member]) -> tuple[int, list[Member]]:
    """Return the turn of the latest mesh of which all ranks of a row are there, and that row."""
    rows = defaultdict(dict)
    for member in members:
        for turn, row, shards, column in member.about["places"]:
            rows[turn, row, shards][column] = member
    if not rows:
        return -1, []  # nobody has trained yet
    whole = [key for key, row in rows.items() if len(row) == key[2]]
    if not whole:
        raise LostError("no row of the mesh is whole: start again from a checkpoint")
    turn, *_ = latest = max(whole)
    return turn, [member for _, member in sorted(rows[latest].items())]


def furthest(members: list[Member], turn: int) -> Member:
    """Return the one that has made most steps in the mesh of `turn`."""
    there = [each for each in members if turn in [place[0] for place in each.about["places"]]]
    return max(there or members, key=lambda member: member.steps)


def whole_row_first(members: list[Member]) -> list[Member]:
    """Order members so that the first ranks are a row with all its shards."""
    _, first = whole_row(members)
    return first + [member for member in latest_first(members) if member not in first]


def sharded(most: int, turn: int) -> tuple[DeviceMesh, nn.Module, Optimizer]:
    """Return a mesh of all ranks with at most that many shards in a row, and what trains on it.

    DTensor caches by shape and names of a mesh, so each turn needs other names: its ranks differ.
    """
    shards = gcd(dist.get_world_size(), most)
    shape = dist.get_world_size() // shards, shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=(f"replicate{turn}", f"shard{turn}"))
    model = lenet(seed=0)
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh, model, SGD(model.parameters(), lr=0.02, momentum=0.9)


def gathered(kept: tuple[nn.Module, Optimizer] | None, ranks: int, turn: int) -> tuple[Any, Any]:
    """Return whole weights and moments on rank 0, from the first `ranks`, which have all shards."""
    row = dist.new_group(list(range(ranks))) if ranks else None
    if kept is None or dist.get_rank() >= ranks:
        return {}, {}
    mesh = DeviceMesh.from_group(row, "cpu", mesh_dim_names=(f"row{turn}",))
    kept[1].zero_grad()  # else torch adds no moments before the first step

    def whole(shard: DTensor) -> torch.Tensor:
        local = shard.to_local()
        shape = shard.shape
        stride = shard.stride()
        return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()

    weights, moments = tree_map_only(DTensor, whole, get_state_dict(*kept))
    return (weights, moments) if dist.get_rank() == 0 else ({}, {})


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over all images")
    parser.add_argument("--shards", type=int, default=2, help="ranks that share a replica")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds to wait for a rank that is silent"
    )
    parser.add_argument("--kill-rank", type=int, help="kill this process once")
    parser.add_argument("--at-step", type=int, default=40, help="the step in which it is killed")
    return parser.parse_args()


class Training:
    """One process's part."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._number = int(os.environ["RANK"])
        images, self._test = load()
        samples = TensorDataset(images.pixels, images.digits)
        self._shares = commrt.Shares(
            samples, 16, place=lambda: (dist.get_rank(), dist.get_world_size())
        )
        self._loader = DataLoader(samples, batch_sampler=self._shares)
        self._meeting = Meeting(self._number, int(os.environ["WORLD_SIZE"]), options.grace)
        self._steps = 0
        self._has_gradients = False
        self._kept: dict[Place, tuple[nn.Module, Optimizer]] = {}
        self._groups: list[dist.ProcessGroup] = []

    def run(self) -> None:
        """Train to the end, in a new mesh after each death and for each new process."""
        while self._meeting.hold(self._steps, self._about(), whole_row_first):
            try:
                self._train(*self._recovered())
            except dist.DistBackendError as error:
                print(
                    f"process {self._number}: step {self._steps} again: {error}\n",
                    end="",
                    flush=True,
                )
            for group in self._groups:  # ranks that wait for this one get an error, and come too
                group.abort()

    def _about(self) -> dict[str, Any]:
        return {"places": [*self._kept], "shares": self._shares.state_dict()}

    def _recovered(self) -> tuple[nn.Module, Optimizer]:
        """Return model and optimizer in a new mesh, with the state of a whole row, or as at the
        start.
        """
        turn, first = whole_row(self._meeting.members)
        mine = next((self._kept[place] for place in self._kept if place.turn == turn), None)
        latest = furthest(self._meeting.members, turn)
        if mine and self._has_gradients and self._steps < latest.steps:
            self._step(mine[1])  # another rank has made this step, so all have its gradients
        self._steps = latest.steps
        self._has_gradients = False
        self._shares.load_state_dict(latest.about["shares"])
        weights, moments = gathered(mine, len(first), self._meeting.turn)
        mesh, model, optimizer = sharded(self._options.shards, self._meeting.turn)
        self._groups = mesh.get_all_groups()
        if first:
            set_model_state_dict(model, weights, options=FROM_RANK_0)
            set_optimizer_state_dict(model, optimizer, moments, options=FROM_RANK_0)
        row, column = mesh.get_coordinate()
        place = Place(self._meeting.turn, row, mesh.size(1), column)
        self._kept[place] = model, optimizer
        dist.barrier()
        self._meeting.loaded()
        self._kept = {place: self._kept[place]}  # all have the state: nobody needs earlier rows
        print(
            f"process {self._number}: row {row} of {tuple(mesh.shape)} from step {self._steps}\n",
            end="",
            flush=True,
        )
        return model, optimizer

    def _train(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Train until a new process comes, or to the end."""
        for pixels, digits in batches(self._shares, self._loader, self._options.epochs):
            if self._meeting.is_called():
                return
            here = self._number, self._steps, self._meeting.turn
            if here == (self._options.kill_rank, self._options.at_step, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            cross_entropy(model(pixels), digits).backward()  # raises if a rank has died
            self._has_gradients = True
            dist.barrier()  # all have their gradients; the norm of clip_grad_norm_ would do, too
            self._step(optimizer)
        with torch.no_grad():
            right = (model(self._test.pixels).argmax(1) == self._test.digits).float().mean().item()
        dist.barrier()  # nobody leaves before all have the last step
        self._meeting.end()
        if dist.get_rank() == 0:
            what = f"{dist.get_world_size()} ranks, {self._steps} steps"
            print(f"{what}: {right:.1%} of {len(self._test.digits):,} test images", flush=True)

    def _step(self, optimizer: Optimizer) -> None:
        optimizer.step()
        self._shares.done()
        self._steps = self._steps + 1
        self._has_gradients = False


def main() -> None:
    """Train, then print the accuracy."""
    dist.init_process_group("commrt", timeout=TIMEOUT, enable_reconfigure=True)  # no ranks yet
    Training(parsed()).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except LostError as error:
        print(error, file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
