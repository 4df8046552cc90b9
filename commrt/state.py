# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as plain bytes: to send them, and to compare replicas bit by bit."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["batches", "dump", "fingerprint", "flatten", "load", "restore"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all `tensors`, whatever their dtypes, as one row of bytes."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


def restore(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the bytes that `flatten` made of others like them.

    Autograd does not notice: a graph that saved a buffer (BatchNorm saves its running statistics, and does
    not read them in training) can still run backward.
    """
    for tensor, part in zip(tensors, torch.split(flat, [t.nbytes for t in tensors]), strict=True):
        tensor.data.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def dump(optimizers: Sequence[Optimizer]) -> Tensor:
    """Settings and state of all `optimizers` as one row of bytes; costs a copy of the state."""
    file = io.BytesIO()
    torch.save([optimizer.state_dict() for optimizer in optimizers], file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def load(flat: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Give `optimizers` what `dump` took from others like them."""
    states = torch.load(io.BytesIO(flat.numpy().data), weights_only=True)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)


def batches(tensors: Sequence[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """`tensors` in order, cut where a batch reaches `nbytes`."""
    batch: list[Tensor] = []
    room = nbytes
    for tensor in tensors:
        batch.append(tensor)
        room -= tensor.nbytes
        if room <= 0:
            yield batch
            batch, room = [], nbytes
    if batch:
        yield batch


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters and buffers; equal exactly if they are bitwise equal."""
    seen = hashlib.sha256()
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, tensor in kind:
            seen.update(name.encode())
            seen.update(flatten([tensor]).numpy().tobytes())
    return seen.hexdigest()
