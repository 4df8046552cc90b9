# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that travel, and where the model keeps them.

It looks at models, and writes nothing: frozen data and a function, for any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from commrt.buckets.changed_model import REPLACED
from commrt.errors import UsageError

AVERAGED_BUFFERS = ("running_mean", "running_var")
"""Names of the buffers of which replicas take the mean: the statistics of torch's norms."""

Named = tuple[str, nn.Parameter]
"""A parameter and its name in the model."""


class TensorSlot(NamedTuple):
    """The place where a model keeps a tensor; what lies there may be replaced."""

    name: str
    module: nn.Module
    key: str
    is_buffer: bool

    @property
    def place(self) -> Mapping[str, Tensor | None]:
        """The dict in which the module keeps it, by its key."""
        return self.module._buffers if self.is_buffer else self.module._parameters  # noqa: SLF001

    def tensor(self) -> Tensor:
        """Return a view of what lies there now, to be read and written without autograd.

        Autograd counts what is written to it, but for buffers of a BatchNorm that trains. Raises
        `UsageError` if nothing is there.
        """
        # `place`, at one call less
        tensor = (self.module._buffers if self.is_buffer else self.module._parameters).get(self.key)  # noqa: SLF001
        if tensor is None:
            raise UsageError(REPLACED.format(name=self.name))
        # A graph saves what BatchNorm counts while it trains, and does not read it: autograd need
        # not notice the write.
        is_unread = self.is_buffer and isinstance(self.module, _BatchNorm) and self.module.training
        return tensor.data if is_unread else tensor.detach()


def exchanged_tensors(model: nn.Module) -> list[TensorSlot]:
    """Return the trainable parameters and `AVERAGED_BUFFERS`, each once, in the order of the
    modules.

    Other buffers (masks, counters, the vectors of a spectral norm, codebooks) have no meaningful
    mean.
    """
    found: dict[int, TensorSlot] = {}
    for prefix, module in model.named_modules():
        for key, tensor in chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            is_buffer = key in module._buffers  # noqa: SLF001
            if (
                key in AVERAGED_BUFFERS and tensor.is_floating_point()
                if is_buffer
                else tensor.requires_grad
            ):
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(tensor), TensorSlot(name, module, key, is_buffer))
    return [*found.values()]
