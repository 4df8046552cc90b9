# SPDX-License-Identifier: Apache-2.0
"""Layers of `summa.py`: matrices in blocks on a [q, q, d] grid of ranks (2.5-D tensor parallelism).

Activations have q * d blocks of rows and q blocks of columns. Weights have q x q blocks, copied d times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Grid:
    """This rank's place on the grid; the global rank is column + q * (row + q * depth)."""

    mesh: DeviceMesh
    q: int
    d: int

    @staticmethod
    def of(q: int, d: int, device: str = "cpu") -> Grid:
        """Open the groups of a [q, q, d] grid. All ranks call it."""
        return Grid(init_device_mesh(device, (d, q, q), mesh_dim_names=("depth", "row", "column")), q, d)

    def at(self, name: str) -> int:
        """Return this rank's "depth", "row" or "column"."""
        return self.mesh.get_local_rank(name)

    @property
    def along_row(self) -> dist.ProcessGroup:
        """The ranks of this row: they differ in their column."""
        return self.mesh.get_group("column")

    @property
    def along_column(self) -> dist.ProcessGroup:
        """The ranks of this column: they differ in their row."""
        return self.mesh.get_group("row")

    @property
    def along_depth(self) -> dist.ProcessGroup:
        """The ranks that hold the same block of each weight."""
        return self.mesh.get_group("depth")

    def samples(self, full: Tensor) -> Tensor:
        """Return this rank's rows of a batch."""
        return full.chunk(self.q * self.d)[self.at("depth") * self.q + self.at("row")]

    def block(self, full: Tensor, matrix: bool) -> Tensor:
        """Return this rank's block of a matrix, or its columns of a tensor that is copied over rows."""
        part = full.chunk(self.q, dim=-1)[self.at("column")]
        return part.chunk(self.q)[self.at("row")] if matrix else part


def sent(x: Tensor, w: Tensor, t: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return X(i, t), from column t of this row, and W(t, j), from row t of this column; both travel at once."""
    pairs = [(x, grid.along_row), (w, grid.along_column)]
    blocks = [block.contiguous() if dist.get_rank(group) == t else _room_for(block) for block, group in pairs]
    finish(
        dist.broadcast(block, group=group, group_src=t, async_op=True)
        for block, (_, group) in zip(blocks, pairs, strict=True)
        if group.size() > 1
    )
    return blocks[0], blocks[1]


def summed_at(t: int, dx: Tensor, dw: Tensor, grid: Grid) -> None:
    """Add up `dx` along the row at column t, and `dw` along the column at row t, at once; others get no sum."""
    finish(
        dist.reduce(part, group=group, group_dst=t, async_op=True)
        for part, group in ((dx, grid.along_row), (dw, grid.along_column))
        if group.size() > 1
    )


def finish(works: Iterable[dist.Work]) -> None:
    """Start all of `works`, then wait for all."""
    for work in [*works]:
        work.wait()


def _room_for(block: Tensor) -> Tensor:
    return torch.empty_like(block, memory_format=torch.contiguous_format)


def summed(part: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of all `groups`."""
    total = part.clone(memory_format=torch.contiguous_format)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total


class Product(Function):
    """Y = XW of blocks: rows of X [tokens / (q d), h / q] and blocks of W [h / q, n / q]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, grid: Grid) -> Tensor:
        """Add up X(i, t) W(t, j)."""
        ctx.save_for_backward(x, w)
        ctx.grid = grid
        y = x.new_zeros(len(x), w.shape[1])
        for t in range(grid.q):
            x_t, w_t = sent(x, w, t, grid)
            y += x_t @ w_t
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dX = dY W' and dW = X' dY."""
        (x, w), grid, dy = ctx.saved_tensors, ctx.grid, gradients[0]
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for t in range(grid.q):
            x_t, w_t = sent(x, w, t, grid)
            dx_t, dw_t = dy @ w_t.T, x_t.T @ dy
            summed_at(t, dx_t, dw_t, grid)
            dx = dx_t if t == grid.at("column") else dx
            dw = dw_t if t == grid.at("row") else dw
        return dx, summed(dw, grid.along_depth), None


class Copied(Function):
    """A parameter that all rows and depths hold: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, grid: Grid) -> Tensor:
        """Return the parameter."""
        ctx.grid = grid
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add up over rows and depths."""
        return summed(gradients[0], ctx.grid.along_column, ctx.grid.along_depth), None


class RowSum(Function):
    """The sum over the ranks of a row. `once`: all of them form the same loss from it, which counts once."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, grid: Grid, once: bool) -> Tensor:
        """Add up along the row."""
        ctx.grid, ctx.once = grid, once
        return summed(part, grid.along_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Pass on the gradient, or the sum of what the ranks of the row did with it."""
        (gradient,) = gradients
        return gradient if ctx.once else summed(gradient, ctx.grid.along_row), None, None


def linear(x: Tensor, w: Tensor, bias: Tensor, grid: Grid) -> Tensor:
    """Return XW + bias, with X [..., h / q]."""
    y: Tensor = Product.apply(x.flatten(0, -2), w, grid)
    return (y + Copied.apply(bias, grid)).unflatten(0, x.shape[:-1])


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, grid: Grid) -> Tensor:
    """Normalise over all columns, of which this rank has x.shape[-1]."""
    width = x.shape[-1] * grid.q
    centred = x - RowSum.apply(x.sum(-1, keepdim=True), grid, False) / width
    variance = RowSum.apply((centred**2).sum(-1, keepdim=True), grid, False) / width
    result: Tensor = centred * (variance + 1e-5).rsqrt() * Copied.apply(scale, grid) + Copied.apply(shift, grid)
    return result


def summed_loss(scores: Tensor, codes: Tensor, grid: Grid) -> Tensor:
    """Return the sum of the cross entropies of this row's tokens; scores [..., letters / q]."""
    count = scores.shape[-1]
    top = scores.detach().amax(-1)
    if grid.q > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=grid.along_row)
    whole = RowSum.apply((scores - top[..., None]).exp().sum(-1), grid, True)
    here = codes - grid.at("column") * count
    own = (here >= 0) & (here < count)
    right = scores.gather(-1, here.clamp(0, count - 1)[..., None])[..., 0] * own
    return (whole.log() + top - RowSum.apply(right, grid, True)).sum()
