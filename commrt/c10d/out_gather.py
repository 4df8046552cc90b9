# SPDX-License-Identifier: Apache-2.0
"""A kernel of ``all_gather_into_tensor_out`` for groups in Python; torch's own asks C++ only.

For torch 2.13 and earlier. It runs on the thread that calls the op, and keeps nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.distributed import ProcessGroup
from torch.library import Library

TORCH_S_KEY = DispatchKey.CompositeExplicitAutograd
"""The dispatch key of torch's own kernel, in an op that has one for all devices."""


def gather_with(kind: type[ProcessGroup]) -> Any:
    """Let ``all_gather_into_tensor_out``, which asks backends in C++, ask groups of a `kind`.

    Return what keeps the kernel registered, for the whole process; other groups still get torch's.
    """
    op = torch.ops._c10d_functional.all_gather_into_tensor_out.default  # noqa: SLF001

    def gathered(source: Tensor, size: int, given: Any, *, out: Tensor) -> Any:
        # both occur in 2.13
        group = _resolve_process_group(cast("Any", given)) if isinstance(given, str) else given
        if not isinstance(group, kind):
            return op._op_dk(TORCH_S_KEY, source, size, given, out=out)  # noqa: SLF001
        # it lives as long as C++ needs it
        work = ProcessGroup.allgather_into_tensor_coalesced(group, [out], [source])
        _register_work(out, work)
        return out

    new_library: Any = Library  # which has no types
    library = new_library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", gathered, key)
    return library
