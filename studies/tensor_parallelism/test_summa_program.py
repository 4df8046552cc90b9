# SPDX-License-Identifier: Apache-2.0
"""The program of 2.5-D tensor parallelism equals one process, moves the bytes of its formula, and names a lost rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import summa_ranks
import torch
from torch.nn import functional

from commrt.testing.processes import run_processes

EXAMPLE = Path(__file__).parent / "summa.py"

pytestmark = pytest.mark.processes


def over_grids(*grids, slow):
    """Run a test on [q, q, d] grids, on some of them only with the slow tests."""
    return pytest.mark.parametrize(
        ("q", "d"), [*grids, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]
    )


def on_ranks(body, q, d, *given):
    """Return what each rank of a [q, q, d] grid returns."""
    outcomes = run_processes(q * q * d, summa_ranks.on_a_grid, body, q, d, *given, holds_store=True)
    assert [outcome.error for outcome in outcomes] == [None] * (q * q * d)
    return [outcome.value for outcome in outcomes]


def reference():
    """Return the loss and the full gradients of the same transformer, of one process and torch's own layers."""
    full, codes, following = summa_ranks.inputs()
    p = {name: tensor.clone().requires_grad_() for name, tensor in full.items()}

    def linear(name, x):
        return functional.linear(x, p[name].T, p[f"{name}.bias"])

    def norm(name, x):
        return functional.layer_norm(x, x.shape[-1:], p[name], p[f"{name}.bias"])

    x = p["letter"][codes] + p["place"]
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    for layer in range(summa_ranks.LAYERS):
        asked = linear(f"{layer}.ask", norm(f"{layer}.norm1", x))
        heard = []
        for head in asked.chunk(summa_ranks.HEADS, dim=-1):
            query, key, value = head.chunk(3, dim=-1)
            weights = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
            heard.append(weights.masked_fill(future, -torch.inf).softmax(-1) @ value)
        x = x + linear(f"{layer}.answer", torch.cat(heard, -1))
        x = x + linear(f"{layer}.narrow", functional.gelu(linear(f"{layer}.widen", norm(f"{layer}.norm2", x))))
    loss = functional.cross_entropy(linear("head", norm("norm", x)).flatten(0, 1), following.flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in p.items()}


def block(name, full, q, row, column):
    """Return what the rank at (row, column) holds: matrices are split both ways, all others by their last dimension."""
    part = full.chunk(q, -1)[column]
    return part.chunk(q)[row] if re.search("(ask|answer|widen|narrow|head)$", name) else part


@pytest.mark.slow
@over_grids((2, 2), (3, 1), slow=[(1, 1), (1, 2), (2, 1)])
def test_loss_and_all_gradients_equal_those_of_one_process(q, d):
    loss, gradients = reference()
    for (row, column, _), own_loss, found in on_ranks(summa_ranks.gradients, q, d):
        assert own_loss == pytest.approx(loss, abs=1e-10)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            own = block(name, gradient, q, row, column)
            torch.testing.assert_close(
                torch.tensor(found[name]), own, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@over_grids((2, 2), slow=[(1, 2), (2, 1), (3, 1)])
def test_a_product_and_its_gradients_move_the_bytes_of_the_formula(monkeypatch, q, d):
    """What every rank receives equals the formula exactly, in broadcasts, reduces and the all-reduce over depths.

    In one tree the root of a broadcast receives nothing, and of a reduce an inner rank receives several parts. Each
    rank is the root once, so each receives q - 1 blocks of every kind. Blocks are multiples of 64 bytes: commrt pads.
    """
    monkeypatch.setenv("COMMRT_SCHEDULES", "broadcast=tree,reduce=tree,all_reduce=ring")
    tokens, width, out = 96, 48, 96
    x, w = tokens * width / (q * q * d), width * out / (q * q)
    formula = 4 * (3 * (q - 1) * (x + w) + 2 * (d - 1) / d * w)
    moved = on_ranks(summa_ranks.traffic, q, d, tokens, width, out)
    assert [each["received"] for each in moved] == [formula] * (q * q * d)


def losses(q, d):
    """Return the losses that 50 steps print, in float32."""
    ranks = q * q * d
    first, *_ = run_processes(ranks, summa_ranks.printed, *options_of(q, d), limit_s=100, holds_store=True)
    assert first.error is None
    return losses_in(first.value)


def losses_under_torchrun(q, d, *more):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={q * q * d}"]
    run = subprocess.run(
        [*torchrun, str(EXAMPLE), *options_of(q, d), *more],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return losses_in(run.stdout)


def options_of(q, d):
    return ["--grid", *map(str, (q, q, d)), "--width", "24", "--layers", "1", "--length", "16"]


def losses_in(text):
    return [float(loss) for loss in re.findall(r"step \d+: ([0-9.]+)", text)]


@pytest.mark.slow
def test_the_losses_of_50_steps_equal_those_of_one_rank_also_under_torchrun():
    alone = losses(1, 1)
    assert len(alone) == 5
    assert alone[-1] < alone[0]
    assert losses(2, 1) == pytest.approx(alone, abs=1e-4)
    assert losses_under_torchrun(1, 2, "--steps", "10") == pytest.approx(alone[:1], abs=1e-4)


@pytest.mark.slow
def test_all_others_name_the_rank_that_is_killed_in_a_step():
    outcomes = run_processes(8, summa_ranks.on_a_grid, summa_ranks.losing_one, 2, 2, limit_s=30, holds_store=True)
    for rank, outcome in enumerate(outcomes):
        if rank != summa_ranks.LOST:
            assert f"peer {summa_ranks.LOST}" in str(outcome.value), (rank, outcome)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grid", "2", "1", "2"], "the grid is Q Q D; Q * D must divide the batch"),
        (["--grid", "0", "0", "1"], "all sizes must be at least 1"),
        (["--grid", "7", "7", "1", "--batch", "7", "--heads", "7", "--width", "7"], "Q must divide the 120 letters"),
        (["--length", "0"], "all sizes must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr(sys, "argv", ["summa.py", *options])
    with pytest.raises(SystemExit):
        summa_ranks.summa.parsed()
    assert says in capsys.readouterr().err
