# SPDX-License-Identifier: Apache-2.0
"""A driver for Triton that loads nothing and runs nothing, but notes each launch that the real one would be given.

Kernels are compiled as for a real GPU, so this needs a process in which Triton does not interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from commrt.kernels import dispatch

STREAM = 7
INTEGERS = {"i32": (-(1 << 31), (1 << 31) - 1), "i64": (-(1 << 63), (1 << 63) - 1), "u64": (0, (1 << 64) - 1)}


@dataclass(frozen=True)
class Call:
    """One launch."""

    kernel: str
    programs: int
    arguments: dict[str, int]
    warps: int


@dataclass
class Driver:
    """What Triton asks of a driver."""

    calls: list[Call] = field(default_factory=list)
    loads: int = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None) -> int:
        return STREAM

    def get_device_capability(self, device: int | None) -> tuple[int, int]:
        return 9, 0  # an H200

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @property
    def utils(self) -> Any:
        """What loads code and knows limits."""

        def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
            self.loads += 1
            return object(), self.loads, 32, 0, 1024

        return SimpleNamespace(
            load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 1 << 17}
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """In place of the launcher in C: takes its arguments, and no others."""
        signature = dict(source.signature)

        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            assert (y, z, stream) == (1, 1, STREAM)
            assert 0 < x < 1 << 31
            assert rest[:3] == (None, None, None)  # no metadata, no hooks
            values = dict(zip(signature, rest[3:], strict=True))
            for name, kind in signature.items():
                assert kind == "constexpr" or _fits(values[name], kind), (name, kind, values[name])
            given = {name: value for name, value in values.items() if signature[name] != "constexpr"}
            self.calls.append(Call(source.fn.__name__, x, given, packed[0]))

        return launch


def _fits(value: object, kind: str) -> bool:
    """Of its type, and for an address as aligned as the kernels are told."""
    low, high = INTEGERS["u64" if kind.startswith("*") else kind]
    return type(value) is int and low <= value <= high and not (kind.startswith("*") and value % 16)


class Operations(TorchDispatchMode):
    """Notes every operation of torch: whatever allocates, copies or waits is one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu() -> Iterator[Driver]:
    """CPU tensors count as a GPU's; nothing happens to them."""
    fake, real, decide = Driver(), driver._active, dispatch.is_on_gpu
    driver.set_active(fake)
    dispatch.is_on_gpu = lambda tensor: True
    try:
        yield fake
    finally:
        driver._active = real
        dispatch.is_on_gpu = decide
