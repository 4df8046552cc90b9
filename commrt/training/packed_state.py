# SPDX-License-Identifier: Apache-2.0
"""One message with the state of a rank that trains, for a process that comes; sends nothing.

A record says what the tensors of bytes are, which `tensor_bytes` or `stateful` made.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from commrt.store.parsing import MALFORMED, malformed, require

T = TypeVar("T")


def pack(record: object, *tensors: Tensor) -> bytes:
    """Return `record`, of plain values and tensors, and `tensors` as bytes."""
    file = io.BytesIO()
    torch.save((record, *tensors), file)
    return file.getvalue()


def unpack(packed: bytes, read: Callable[[Any], T], count: int) -> tuple[T, list[Tensor]]:
    """Return what was packed, the record parsed by `read`, and `count` tensors, and run none of it.

    Raises `DisagreementError` for other bytes.
    """
    try:
        record, *tensors = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        require(
            len(tensors) == count
            and all(
                isinstance(tensor, Tensor) and tensor.dtype == torch.uint8 for tensor in tensors
            )
        )
        return read(record), tensors
    except (
        *MALFORMED,
        UnpicklingError,
        EOFError,
        RuntimeError,
        AssertionError,
    ) as error:  # as torch has no one error
        raise malformed("state of another rank", packed) from error
