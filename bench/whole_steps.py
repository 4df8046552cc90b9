# SPDX-License-Identifier: Apache-2.0
"""Measure whole training steps beside DDP over Gloo, and beside no exchange: ``python bench/whole_steps.py``.

A GPT is trained on CPUs: forward and backward pass, clipping, AdamW. All ways run interleaved in one job. A turn makes
some steps, and gives the mean time of a step on the slowest rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import table
from records import append, made
from step_worker import HOST, in_turns
from test_step import free_port
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training_models import Gpt

import commrt
from commrt import c10d

SIZES = {"small": ((2, 96, 4, 64, 32), 16, 30), "medium": ((6, 384, 4, 512, 64), 4, 3)}
"""Layers, width, heads, tokens and context of the model; sequences of a batch; steps of a turn."""
DDP, PLAIN = "ddp", "no exchange"
ATTACHED: dict[str, tuple[commrt.Algorithm, str]] = {
    "torus2d": (commrt.Torus2D(), "own"),
    "torus2d views": (commrt.Torus2D(), "views"),
    "gossip": (commrt.Gossip(), "own"),
}
WAYS = (DDP, "ddp, backend commrt", *ATTACHED, PLAIN)


def step_of(way: str, size: str, world: commrt.World, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a step of training, the same in every way but for what is exchanged."""
    (*shape, tokens, context), batch, _ = SIZES[size]
    torch.manual_seed(0)
    model: nn.Module = Gpt(*shape, tokens, context)
    params, forward = [*model.parameters()], model
    optimizer = torch.optim.AdamW(params, foreach=True)
    if way in ATTACHED:
        algorithm, gradients = ATTACHED[way]
        commrt.attach(model, optimizer, algorithm, world=world, gradients=gradients)
    elif way != PLAIN:
        forward = DistributedDataParallel(model, process_group=None if way == DDP else group)

    def step() -> None:
        texts = torch.randint(tokens, (batch, context))
        cross_entropy(forward(texts).flatten(0, 1), texts.flatten()).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(rank: int, ranks: int, port: int, size: str, rounds: int, answers: SimpleQueue) -> None:
    """Do what a rank does; rank 0 puts the times on `answers`."""
    torch.set_num_threads(1)
    own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    own |= {"MASTER_ADDR": HOST, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group("gloo")
    with commrt.init() as world:
        group = dist.new_group(backend=c10d.NAME)
        steps = {way: step_of(way, size, world, group) for way in WAYS}
        times = in_turns(steps, rounds, SIZES[size][2], warmup=2)
    if rank == 0:
        answers.put(times)
    dist.destroy_process_group()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--records", type=Path, help="append records to this file, as JSON lines")
    options = parser.parse_args()
    for ranks in options.ranks:
        for size in SIZES:
            answers = multiprocessing.get_context("spawn").SimpleQueue()
            spawn(work, (ranks, free_port(), size, options.rounds, answers), nprocs=ranks)
            times, case = answers.get(), f"{size} GPT, {ranks} processes"
            print(f"{case}\n{table(times, dict.fromkeys(WAYS, DDP))}\n", flush=True)
            append(options.records, made("whole steps", case, times, dict.fromkeys(WAYS, DDP)))


if __name__ == "__main__":
    main()
