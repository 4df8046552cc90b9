# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on CPU tensors, with exact casts, and looks at every access to memory.

Triton's interpreter truncates where it casts to bfloat16, and reads and writes wherever it is told to. Here casts are
torch's, and an access outside of what was handed to the kernel, a hint that is not kept, or a place that two programs
write is an error.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from commrt.kernels import dispatch
from commrt.kernels.device import combine, packing

__all__ = ["BadAccess", "Launches", "Memory", "interpreted_gpu", "watched"]

FLOATS = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64}


class BadAccess(AssertionError):
    """A kernel touched memory that it must not touch."""


@dataclass
class Memory:
    """What a kernel may touch, and what it has written."""

    spans: list[tuple[int, int]]
    """Sorted (first byte, one past the last) of every tensor."""
    written: set[int] = field(default_factory=set)
    """First bytes of all elements written by earlier stores."""
    rewritable: tuple[int, int] = (0, 0)
    """Where several programs may write the same value."""
    accesses: int = 0

    def check(self, pointers: np.ndarray, mask: np.ndarray, nbytes: int, what: str) -> np.ndarray:
        """The addresses of the active lanes, all of which lie inside a span."""
        addresses = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)]
        self.accesses += addresses.size
        starts = [start for start, _ in self.spans]
        for address in addresses.tolist():
            span = bisect_right(starts, address) - 1
            if span < 0 or address + nbytes > self.spans[span][1]:
                raise BadAccess(f"{what} of {nbytes} bytes at {address:#x}, outside of all tensors")
        return addresses

    def store(self, pointers: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        """Note a store; a place that was written before is an error."""
        addresses = self.check(pointers, mask, nbytes, "store")
        low, high = self.rewritable
        places = [a for a in addresses.tolist() if not low <= a < high]
        if len(places) != len(set(places)) or not self.written.isdisjoint(places):
            raise BadAccess("a place was written twice")
        self.written.update(places)


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


@contextmanager
def watched(tensors: list[Tensor], rewritable: Tensor | None = None) -> Iterator[Memory]:
    """Kernels may touch contiguous `tensors` only, and write each place once, but `rewritable`."""
    memory = Memory(sorted(_span(tensor) for tensor in tensors if tensor.numel()))
    if rewritable is not None:
        memory.rewritable = _span(rewritable)
    builder = interpreter.InterpreterBuilder
    accesses = {
        (builder, "create_masked_load"): _load(builder.create_masked_load, memory),
        (builder, "create_masked_store"): _store(builder.create_masked_store, memory),
    }
    with _replaced(_exact() | accesses):
        yield memory


def _exact() -> dict[tuple[Any, str], Any]:
    builder = interpreter.InterpreterBuilder
    return {
        (builder, "cast_impl"): _cast(builder.cast_impl),
        (builder, "create_fp_to_fp"): lambda self, src, to, rounding: self.cast_impl(src, to),
        (interpreter.ReduceOps, "apply_impl"): _reduce(interpreter.ReduceOps.apply_impl),
        (interpreter.TensorHandle, "set_attr"): _hint(interpreter.TensorHandle.set_attr),
    }


@contextmanager
def _replaced(attributes: dict[tuple[Any, str], Any]) -> Iterator[None]:
    before = {place: getattr(*place) for place in attributes}
    for place, new in attributes.items():
        setattr(*place, new)
    try:
        yield
    finally:
        for place, old in before.items():
            setattr(*place, old)


@dataclass
class Launches:
    """A GPU that consists of the interpreter: what was launched on it, in order."""

    names: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def launch_of(self, variant: Any, device: torch.device) -> Any:
        """In place of `commrt.kernels.device.launch.launch_of`: runs `variant` with the types it declares."""
        types, constants = dict(variant.types), dict(variant.constants)

        def launch(programs: int, *arguments: int) -> None:
            typed = {name: _typed(value, kind) for (name, kind), value in zip(types.items(), arguments, strict=True)}
            with self.lock:  # the interpreter has one state for all
                self.names.append(variant.kernel.fn.__name__)
                _interpret(variant.kernel.fn, programs, typed | constants)

        return launch


def _typed(value: int, kind: str) -> tl.tensor:
    to = tl.str_to_ty(kind, None)
    bits = np.uint64 if kind.startswith("*") else interpreter._get_np_dtype(to)
    return tl.tensor(interpreter.TensorHandle(np.array([value], bits), to), to)


def _interpret(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    scope = interpreter._patch_lang(kernel)
    try:
        interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
        for program in range(programs):
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
            kernel(**arguments)
    finally:
        scope.restore()


@contextmanager
def interpreted_gpu() -> Iterator[Launches]:
    """CPU tensors count as a GPU's, whose kernels run in the interpreter, with exact casts."""
    launches = Launches()
    modules = (packing, combine)
    attributes: dict[tuple[Any, str], Any] = {(dispatch, "is_on_gpu"): lambda tensor: True}
    attributes |= {(module, "launch_of"): launches.launch_of for module in modules}
    attributes |= {(module, "arch_of"): lambda device: 90 for module in modules}
    with _replaced(_exact() | attributes):
        yield launches


def _load(plain: Any, memory: Memory) -> Any:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, "load")
        return plain(self, pointers, mask, *rest)

    return load


def _store(plain: Any, memory: Memory) -> Any:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.store(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
        return plain(self, pointers, value, mask, *rest)

    return store


def _cast(plain: Any) -> Any:
    """By torch, which rounds to nearest even as the GPU does."""

    def cast(self: Any, source: Any, to: Any) -> Any:
        kinds = FLOATS.get(source.dtype.scalar), FLOATS.get(to.scalar)
        if None in kinds:
            return plain(self, source, to)
        data = np.ascontiguousarray(source.data)
        values = torch.from_numpy(data.view(np.int16) if data.itemsize == 2 else data)
        values = values.view(kinds[0]).to(kinds[1])
        bits = values.view(torch.int16).numpy() if values.element_size() == 2 else values.numpy()
        kind = interpreter._get_np_dtype(to)
        return interpreter.TensorHandle(bits.view(kind).reshape(data.shape), to.scalar)

    return cast


def _reduce(plain: Any) -> Any:
    """The maximum with NaN at numpy's speed."""

    def apply(self: Any, values: Any) -> Any:
        if getattr(self.combine_fn, "__name__", "") != "_larger":
            return plain(self, values)
        return self.to_tensor(np.max(values[0].handle.data, axis=self.axis, keepdims=self.keep_dims), values[0].dtype)

    return apply


def _hint(plain: Any) -> Any:
    """A hint is a promise that the GPU relies on; pointers are counted in bytes."""

    def hint(self: Any, key: str, value: Any) -> None:
        size = int(value[0] if isinstance(value, list) else value)
        if key == "tt.divisibility" and np.any(self.data % size):
            raise BadAccess(f"what is said to be a multiple of {size} is not")
        if key == "tt.contiguity" and np.any(np.diff(self.data.reshape(-1, size)) != 1):
            raise BadAccess(f"what is said to run on for {size} elements does not")
        plain(self, key, value)

    return hint
