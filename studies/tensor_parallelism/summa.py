# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer whose matrices are split over a [q, q, d] grid of ranks (2.5-D tensor parallelism).

::

    torchrun --nproc-per-node 8 studies/tensor_parallelism/summa.py --grid 2 2 2  # or 4 ranks and 2 2 1, or 1 and 1 1 1

All collectives run on ``backend="commrt"``. Every grid trains the same model on the same batches, so the losses are
equal but for rounding. The text is that of `examples/char_gpt.py`. The layers are in `summa_layers.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from summa_layers import Copied, Grid, layer_norm, linear, summed, summed_loss
from torch import Tensor
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention

import commrt.c10d  # noqa: F401  # it registers the backend

MATRICES = ("ask", "answer", "widen", "narrow", "head")


def full_parameters(letters: int, length: int, width: int, layers: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all parameters of the model, before they are split."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "ask": (width, 3 * width),
        "answer": (width, width),
        "widen": (width, 4 * width),
        "narrow": (4 * width, width),
    }
    full = {"letter": (letters, width), "place": (length, width), "head": (width, letters), "head.bias": (letters,)}
    for layer in range(layers):
        for name, shape in shapes.items():
            full |= {f"{layer}.{name}": shape, f"{layer}.{name}.bias": shape[1:]}
    norms = [*(f"{layer}.norm{i}" for layer in range(layers) for i in (1, 2)), "norm"]
    made = {name: torch.randn(shape, generator=draw, dtype=torch.float64) * 0.05 for name, shape in full.items()}
    for norm in norms:
        made |= {norm: torch.ones(width), f"{norm}.bias": torch.zeros(width)}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


class SplitGPT:
    """A GPT of which this rank holds its blocks of all parameters."""

    def __init__(self, full: dict[str, Tensor], heads: int, grid: Grid) -> None:
        self.heads, self.grid = heads, grid
        self.layers = sum(name.endswith(".ask") for name in full)
        self.own = {name: self.block(name, tensor).clone().requires_grad_() for name, tensor in full.items()}

    def block(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's block of a parameter or of its gradient."""
        return self.grid.block(full, matrix=name.endswith(MATRICES))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer."""
        return linear(x, self.own[name], self.own[f"{name}.bias"], self.grid)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a layer norm."""
        return layer_norm(x, self.own[name], self.own[f"{name}.bias"], self.grid)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Attend with the whole heads of this column; no rank needs those of another."""
        parts = self.linear(f"{layer}.ask", x).unflatten(-1, (self.heads // self.grid.q, 3, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(-2))
        heard = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.linear(f"{layer}.answer", heard.transpose(1, 2).flatten(-2))

    def scores(self, codes: Tensor) -> Tensor:
        """Map this row's [samples, length] to this rank's [samples, length, letters / q]."""
        letter, place = (Copied.apply(self.own[name], self.grid) for name in ("letter", "place"))
        x = embedding(codes, letter) + place
        for layer in range(self.layers):
            x = x + self.attention(layer, self.norm(f"{layer}.norm1", x))
            x = x + self.linear(f"{layer}.narrow", gelu(self.linear(f"{layer}.widen", self.norm(f"{layer}.norm2", x))))
        return self.linear("head", self.norm("norm", x))

    def loss(self, codes: Tensor, following: Tensor) -> Tensor:
        """Return this row's part of the mean loss of the whole batch [samples, length]."""
        mine, next_ones = self.grid.samples(codes), self.grid.samples(following)
        return summed_loss(self.scores(mine), next_ones, self.grid) / codes.numel()


def batches(count: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of the text, and the same pieces one letter later; equal on all ranks."""
    text = "\n".join(topics.values())
    number_of = {letter: number for number, letter in enumerate(sorted({*text}))}
    codes = torch.tensor([number_of[letter] for letter in text])
    draw = torch.Generator().manual_seed(1)
    while True:
        pieces = codes[torch.randint(len(codes) - length, (count, 1), generator=draw) + torch.arange(length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def letters_of_text() -> int:
    """Return how many letters the model knows: those of the text, rounded up so that 2 to 6 or 8 columns divide it."""
    used = len({*"\n".join(topics.values())})
    return -(-used // 120) * 120


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--grid", type=int, nargs=3, default=[2, 2, 2], metavar=("Q", "Q", "D"), help="rows, columns, depth")
    add("--steps", type=int, default=50, help="training steps")
    add("--dtype", choices=["float32", "float64"], default="float32", help="dtype of the model")
    add("--batch", type=int, default=12, help="pieces of text, of all ranks together")
    add("--length", type=int, default=32, help="letters per piece")
    add("--width", type=int, default=48, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    options = parser.parse_args()
    rows, q, d = options.grid
    if min(*options.grid, options.batch, options.length, options.width, options.heads, options.layers) < 1:
        parser.error("all sizes must be at least 1")
    if rows != q or options.batch % (q * d) or options.heads % q or options.width % options.heads:
        parser.error("the grid is Q Q D; Q * D must divide the batch, Q the heads, and the heads the width")
    if letters_of_text() % q:
        parser.error(f"Q must divide the {letters_of_text()} letters of the model")
    return options


def train(options: argparse.Namespace, grid: Grid) -> None:
    """Train, and print the loss of the whole batch."""
    dtype = getattr(torch, options.dtype)
    full = full_parameters(letters_of_text(), options.length, options.width, options.layers, dtype)
    model = SplitGPT(full, options.heads, grid)
    optimizer = torch.optim.Adam(model.own.values(), options.lr)  # it works on single elements: any split will do
    for step, (codes, following) in zip(
        range(1, options.steps + 1), batches(options.batch, options.length), strict=False
    ):
        optimizer.zero_grad()
        loss = model.loss(codes, following)
        loss.backward()
        optimizer.step()
        whole = summed(loss.detach(), grid.along_column, grid.along_depth)
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: {whole.item():.6f}", flush=True)


@contextmanager
def naming_who_is_lost(grid: Grid) -> Iterator[None]:
    """Ask all ranks after an error in a row, column or depth.

    A rank that has no group in common with a lost one waits for a neighbour, until that one aborts their group. In the
    group of all ranks, each error says which rank was lost.
    """
    try:
        yield
    except dist.DistBackendError:
        for group in (grid.along_row, grid.along_column, grid.along_depth):
            group.abort()
        dist.barrier()
        raise


def main() -> None:
    """Open the process group, train, and close it."""
    options = parsed()
    torch.set_num_threads(1)
    dist.init_process_group("commrt")
    try:
        q, _, d = options.grid
        if dist.get_world_size() != q * q * d:
            raise SystemExit(
                f"a grid of {q} x {q} x {d} needs {q * q * d} ranks: torchrun --nproc-per-node {q * q * d}"
            )
        grid = Grid.of(q, d)
        with naming_who_is_lost(grid):
            train(options, grid)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
