# SPDX-License-Identifier: Apache-2.0
"""CuPy's binding of NCCL: where it is, and which versions can be used.

Imports CuPy on the caller's thread when it is asked; asks no other rank, and keeps nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

from commrt.errors import UsageError
from commrt.store.environment import variable

Binding = Any
"""CuPy's module ``cupy.cuda.nccl``, untyped; `tests/support/nccl_stand_in.py` has what is used."""


def load() -> Binding:
    """Return CuPy's binding of the NCCL that torch has loaded; raise `UsageError` if unusable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy warns of is an error below
            from cupy.cuda import nccl  # noqa: PLC0415  # slow to import, and absent without a GPU
    except ImportError as error:
        raise UsageError(
            f"GPUs exchange through CuPy, which cannot be imported ({error}): pip install"
            " cupy-cuda13x"
        ) from error
    require_usable(nccl)
    return nccl


def require_usable(binding: Binding) -> None:
    """Raise `UsageError` for an NCCL that would fail later with an error harder to read."""
    if not binding.available:
        raise UsageError(
            "CuPy finds no NCCL library: install the one of your torch, such as pip install"
            " nvidia-nccl-cu13"
        )
    if variable("NCCL_COMM_BLOCKING") == "0":
        raise UsageError(
            "NCCL_COMM_BLOCKING=0 makes calls return before they are done, which CuPy takes for an"
            " error: unset it"
        )
    runtime = binding.get_version()
    built = binding.get_build_version()
    if runtime < built:
        raise UsageError(
            f"NCCL {named(runtime)} was loaded, and CuPy was built with {named(built)}: upgrade"
            " nvidia-nccl"
        )


def named(version: int) -> str:
    """Return ``2.28.9`` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
