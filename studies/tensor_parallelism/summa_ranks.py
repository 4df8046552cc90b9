# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_summa_program do."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO

import summa
import summa_layers
import torch
import torch.distributed as dist

import commrt.c10d  # noqa: F401  # it registers the backend
from commrt.runtime.executor import BoundProgram

LETTERS, LENGTH, WIDTH, HEADS, LAYERS, SAMPLES = 36, 4, 12, 6, 2, 12
LOST = 5


def on_a_grid(tell, body, q, d, *given):
    """Return what `body` returns for the grid."""
    torch.set_num_threads(1)
    dist.init_process_group("commrt", timeout=timedelta(seconds=60))
    try:
        return body(summa_layers.Grid.of(q, d), *given)
    finally:
        dist.destroy_process_group()


def printed(tell, *options):
    """Return what the example prints on this rank."""
    sys.argv = ["summa.py", *options]
    with redirect_stdout(StringIO()) as out:
        summa.main()
    return out.getvalue()


def inputs():
    """Return the full parameters, a batch, and the letters that follow."""
    full = summa.full_parameters(LETTERS, LENGTH, WIDTH, LAYERS, torch.float64)
    pieces = torch.randint(LETTERS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return full, pieces[:, :-1], pieces[:, 1:]


def gradients(grid):
    """Return this rank's place (row, column, depth), the loss of the whole batch, and its blocks of all gradients."""
    full, codes, following = inputs()
    model = summa.SplitGPT(full, HEADS, grid)
    loss = model.loss(codes, following)
    loss.backward()
    whole = summa_layers.summed(loss.detach(), grid.along_column, grid.along_depth)
    found = {name: parameter.grad.numpy() for name, parameter in model.own.items()}
    return tuple(grid.at(name) for name in ("row", "column", "depth")), whole.item(), found


def traffic(grid, tokens, width, out):
    """Return the bytes that this rank sends and receives in the forward and the backward pass of one product."""
    x = torch.ones(tokens // (grid.q * grid.d), width // grid.q, requires_grad=True)
    w = torch.ones(width // grid.q, out // grid.q, requires_grad=True)
    dist.barrier()
    counted = {"sent": 0, "received": 0}
    run = BoundProgram.run

    def counting(self, *given):
        counted["sent"] += sum(message.data.nbytes for message in self.group.sends)
        counted["received"] += sum(message.data.nbytes for message in self.group.recvs)
        return run(self, *given)

    BoundProgram.run = counting
    summa_layers.Product.apply(x, w, grid).sum().backward()
    BoundProgram.run = run
    return counted


def losing_one(grid):
    """Train; rank LOST is killed in the backward pass of the third step. Return the error of the others."""
    full, codes, following = inputs()
    model = summa.SplitGPT(full, HEADS, grid)
    try:
        with summa.naming_who_is_lost(grid):
            for step in range(100):
                loss = model.loss(codes, following)
                if step == 2 and dist.get_rank() == LOST:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
