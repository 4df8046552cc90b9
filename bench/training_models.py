# SPDX-License-Identifier: Apache-2.0
"""Models, data and optimizers of the measured training steps: torchvision's ResNet-50, and a GPT of 124 M parameters.

Without a GPU both are tiny, which shows that they run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.optim import SGD, AdamW, Optimizer

__all__ = ["WORKLOADS", "Gpt", "Ranges", "Workload"]

Ranges = Callable[[str], AbstractContextManager[object]]
"""Returns a context for a named part of a step."""


class Workload(NamedTuple):
    """What one rank trains."""

    model: Callable[[], nn.Module]
    """Return the same model on every rank, on the device."""
    optimizer: Callable[[nn.Module], Optimizer]
    inputs: Tensor
    labels: Tensor
    describes: str

    def step(self, forward: nn.Module, optimizer: Optimizer, within: Ranges = lambda _: nullcontext()) -> None:
        """Take one step under bf16 autocast."""
        optimizer.zero_grad()
        with within("forward"), torch.autocast(self.inputs.device.type, torch.bfloat16):
            outputs = forward(self.inputs)
            loss = cross_entropy(outputs.flatten(0, -2), self.labels.flatten())
        with within("backward"):
            loss.backward()
        with within("optimizer"):
            optimizer.step()


def resnet50(device: torch.device) -> Workload:
    """Return ResNet-50 on 64 random images, channels last, SGD with momentum; needs torchvision."""
    from torchvision import models  # noqa: PLC0415  # not everywhere

    batch, size, make = (64, 224, models.resnet50) if device.type == "cuda" else (2, 64, models.squeezenet1_1)
    torch.backends.cudnn.benchmark = True

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().to(device).to(memory_format=torch.channels_last)

    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device)
    told = f"{make.__name__}, {batch} images of {size} x {size} per rank, channels last, bf16 autocast, SGD momentum"
    return Workload(model, lambda made: SGD(made.parameters(), 0.01, momentum=0.9), images, labels, told)


def gpt(device: torch.device) -> Workload:
    """Return a GPT with the sizes of GPT-2 small on 4 random sequences of 512 tokens, fused AdamW."""
    sizes = (12, 768, 12, 50257, 512) if device.type == "cuda" else (2, 64, 4, 512, 16)
    batch = 4

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Gpt(*sizes).to(device)

    tokens, following = (torch.randint(0, sizes[3], (batch, sizes[4]), device=device) for _ in range(2))
    told = "GPT of {} layers, width {}, {} heads, {} tokens (tied), context {}".format(*sizes)
    told += f", batch {batch} per rank, bf16 autocast, fused AdamW"
    return Workload(model, lambda made: AdamW(made.parameters(), 3e-4, fused=True), tokens, following, told)


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {"resnet50": resnet50, "gpt": gpt}


class Gpt(nn.Module):
    """A decoder in plain torch, with learned positions; the token embedding is the output layer too."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, context, vocabulary]."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.tokens.weight)


class Block(nn.Module):
    """Attention and two layers, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, new = heads, partial(nn.Linear, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.attended = new(3 * width), new(width)
        self.wide = nn.Sequential(new(4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [batch, context, width] one layer further."""
        parts = self.mixed(self.before(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))
