# SPDX-License-Identifier: Apache-2.0
"""The calls of ``cupy.cuda.nccl`` that are used here, and under which conditions they are."""

from __future__ import annotations

import warnings
from typing import Protocol, cast

from commrt.errors import UsageError
from commrt.membership.launcher import nccl_variable

__all__ = ["Binding", "Communicator", "load", "named", "require_usable"]


class Communicator(Protocol):
    """``NcclCommunicator``: one rank of a clique, used by one thread at a time except where it says so."""

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Queue a send on `stream`."""
        ...

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Queue a receive on `stream`."""
        ...

    def check_async_error(self) -> None:
        """Raise what went wrong behind a call that had returned; from any thread."""
        ...

    def abort(self) -> None:
        """End what is queued and free all; from any thread. Tells no other rank."""
        ...

    def destroy(self) -> None:
        """Free all once what is queued is done; waits for the other ranks of this host."""
        ...


class Binding(Protocol):
    """The module."""

    NCCL_INT8: int
    available: bool

    def get_build_version(self) -> int:
        """The NCCL that CuPy was built with, as 10,000 * major + 100 * minor + patch."""
        ...

    def get_version(self) -> int:
        """The NCCL in this process."""
        ...

    def get_unique_id(self) -> bytes:
        """What one rank makes and tells the others."""
        ...

    def groupStart(self) -> None:  # noqa: N802  # as in CuPy
        """Gather the calls of this thread."""
        ...

    def groupEnd(self) -> None:  # noqa: N802  # as in CuPy
        """Queue what was gathered; waits for peers that are met for the first time."""
        ...

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int, /) -> Communicator:  # noqa: N802, N803  # as in CuPy
        """Join a clique; returns when all its ranks have come."""
        ...


def load() -> Binding:
    """CuPy's binding, on the NCCL that torch has loaded; raises `UsageError` if it cannot be used."""
    import torch  # noqa: F401, PLC0415  # first: two copies of NCCL would be loaded otherwise

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy warns of raises below
            from cupy.cuda import nccl  # noqa: PLC0415  # heavy, and absent without a GPU
    except ImportError as error:
        raise UsageError(
            f"GPUs exchange through CuPy, which cannot be imported ({error}): pip install cupy-cuda13x"
        ) from error
    binding = cast("Binding", nccl)
    require_usable(binding)
    return binding


def require_usable(binding: Binding) -> None:
    """Raise `UsageError` for an NCCL that would fail later, or in other words."""
    if not binding.available:
        raise UsageError(
            "CuPy finds no NCCL library: install the one of your torch, such as pip install nvidia-nccl-cu13"
        )
    if nccl_variable("COMM_BLOCKING") == "0":
        raise UsageError(
            "NCCL_COMM_BLOCKING=0 makes calls return before they are done, which CuPy takes for an error: unset it"
        )
    runtime, built = binding.get_version(), binding.get_build_version()
    if runtime < built:
        raise UsageError(
            f"NCCL {named(runtime)} was loaded, and CuPy was built with {named(built)}: upgrade nvidia-nccl"
        )


def named(version: int) -> str:
    """``2.28.9`` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
