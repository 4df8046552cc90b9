# SPDX-License-Identifier: Apache-2.0
"""Layers of `summa.py`: matrices in blocks on a [q, q, d] grid of ranks (2.5-D tensor parallelism).

Activations have q * d blocks of rows and q blocks of columns. Weights have q x q blocks, copied d times.
"""

from __future__ import annotations

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


def sent_from(block: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Return the block of rank `source` of the group, on all its ranks."""
    mine = dist.get_rank(group) == source
    received = block.contiguous() if mine else torch.empty_like(block, memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.broadcast(received, group=group, group_src=source)
    return received


def summed_at(part: Tensor, target: int, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' parts; only rank `target` of the group can use it."""
    if group.size() > 1:
        dist.reduce(part, group=group, group_dst=target)
    return part


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
            y += sent_from(x, t, grid.along_row) @ sent_from(w, t, grid.along_column)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dX = dY W' and dW = X' dY."""
        (x, w), grid, dy = ctx.saved_tensors, ctx.grid, gradients[0]
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for t in range(grid.q):
            dx_t = summed_at(dy @ sent_from(w, t, grid.along_column).T, t, grid.along_row)
            dw_t = summed_at(sent_from(x, t, grid.along_row).T @ dy, t, grid.along_column)
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
