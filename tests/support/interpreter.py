# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on CPU tensors, with exact casts, and looks at every access to memory.

Triton's interpreter truncates where it casts to bfloat16, and reads and writes wherever it is told to. Here casts are
torch's, and an access outside of what was handed to the kernel, a hint that is not kept, or a place that two programs
write is an error.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._C import TensorBase
from triton.runtime import interpreter

from commrt.kernels import dispatch
from commrt.kernels.device import launch as device_launch
from commrt.kernels.device import packing, variants

BUILDER = interpreter.InterpreterBuilder
FLOATS = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64}


class BadAccess(AssertionError):
    """A kernel touched memory that it must not touch."""


@dataclass
class Memory:
    """What a kernel may touch, and what it has written."""

    spans: set[tuple[int, int]]
    """(first byte, one past the last) of every tensor."""
    written: set[int] = field(default_factory=set)
    """First bytes of all elements written by earlier stores."""
    _known: int = -1
    """Of how many spans the bounds are."""

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the parts of memory begin and end that lie apart; the first of them is empty."""
        if self._known != len(self.spans):
            self._known, parts = len(self.spans), [(0, 0)]
            for start, end in sorted(self.spans.copy()):  # other threads may add some
                last = parts.pop() if start < parts[-1][1] else (start, end)
                parts.append((last[0], max(last[1], end)))
            self._starts, self._ends = np.array(parts, np.uint64).T
        return self._starts, self._ends

    def address_of(self, tensor: Tensor) -> int:
        """Return the address of `tensor`, in place of `Tensor.data_ptr`, and allow access to its memory."""
        span = _span(tensor)
        self.spans.add(span)
        return span[0]

    def check(self, pointers: np.ndarray, mask: np.ndarray, nbytes: int, what: str) -> np.ndarray:
        """The addresses of the active lanes, all of which lie inside a span."""
        addresses = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)].astype(np.uint64)
        starts, ends = self.bounds()
        outside = addresses + np.uint64(nbytes) > ends[np.searchsorted(starts, addresses, side="right") - 1]
        if outside.any():
            raise BadAccess(f"{what} of {nbytes} bytes at {addresses[outside][0]:#x}, outside of all tensors")
        return addresses

    def store(self, pointers: np.ndarray, mask: np.ndarray, nbytes: int) -> None:
        """Note a store; a place that was written before is an error."""
        addresses = self.check(pointers, mask, nbytes, "store")
        places = addresses.tolist()
        if len(places) != len(set(places)) or not self.written.isdisjoint(places):
            raise BadAccess("a place was written twice")
        self.written.update(places)


def _span(tensor: Tensor) -> tuple[int, int]:
    start = TensorBase.data_ptr(tensor)
    return start, start + tensor.numel() * tensor.element_size()


def complaint(check: Callable[..., Any], *arguments: Any) -> str | None:
    """Return what `check` says against a kernel: an assertion that fails, a bad access, or that it returns False."""
    try:
        return "differs" if check(*arguments) is False else None
    except AssertionError as error:
        return str(error) or "differs"
    except interpreter.InterpreterError as error:
        if "BadAccess" not in repr(error):
            raise
        return repr(error)


def require(check: Callable[..., Any], rows: Iterable[tuple[Any, ...]], *before: Any) -> None:
    """Require that `check` finds nothing wrong with any row, given after what comes `before` all rows."""
    assert {row: said for row in rows if (said := complaint(check, *before, *row))} == {}


def plant(bug: tuple[str, str, str], kernels: Iterable[str], within: Path, patch: Any) -> None:
    """Import the modules of `kernels` with `bug`, (module, text, what stands there instead), to launch them."""
    module, before, after = bug
    package = Path(mkdtemp(prefix="planted_", dir=within))
    for path in Path(variants.__file__).parent.glob("*.py"):
        source = path.read_text().replace("commrt.kernels.device", package.name)
        if path.stem == module:
            assert source.count(before) == 1
            source = source.replace(before, after)
        (package / path.name).write_text(source)
    patch.syspath_prepend(within)
    for name in kernels:
        broken = importlib.import_module(f"{package.name}.{name}")
        for kernel in (each for each in vars(broken) if each.endswith("_kernel")):
            patch.setattr(variants, kernel, getattr(broken, kernel))


@contextmanager
def watched(tensors: list[Tensor]) -> Iterator[Memory]:
    """Kernels may touch contiguous `tensors` only, and write each place once, but for marks."""
    memory = Memory({_span(tensor) for tensor in tensors if tensor.numel()})
    with _replaced(_exact() | _checked(memory)), _silent():
        yield memory


def _checked(memory: Memory) -> dict[tuple[Any, str], Any]:
    """Loads and stores that look where they are."""
    return {
        (BUILDER, "create_masked_load"): _load(BUILDER.create_masked_load, memory),
        (BUILDER, "create_masked_store"): _store(BUILDER.create_masked_store, memory),
    }


def _exact() -> dict[tuple[Any, str], Any]:
    return {
        (BUILDER, "cast_impl"): _cast(BUILDER.cast_impl),
        (BUILDER, "create_fp_to_fp"): lambda self, src, to, rounding: self.cast_impl(src, to),
        (interpreter.TensorHandle, "set_attr"): _hint(interpreter.TensorHandle.set_attr),
    }


def _silent() -> np.errstate:
    """Overflow and NaN are as silent as on a GPU."""
    return np.errstate(over="ignore", invalid="ignore")


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
    memory: Memory = field(default_factory=lambda: Memory(set()))
    """All tensors whose addresses somebody asked for."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def launch_of(self, variant: Any, device: torch.device) -> Any:
        """In place of `commrt.kernels.device.launch.launch_of`: runs `variant` with the types it declares."""

        def launch(programs: int, *arguments: int) -> None:
            with self.lock:  # the interpreter has one state for all
                self.names.append(variant.kernel.fn.__name__)
                self.memory.written.clear()
                interpret(variant, range(programs), *arguments)

        return launch


def interpret(variant: Any, programs: Iterable[int], *arguments: int) -> None:
    """Run some programs of `variant`, with arguments as a driver gets them: addresses as integers."""
    values = zip(variant.types, arguments, strict=True)
    typed = {name: _typed(value, kind) for (name, kind), value in values} | dict(variant.constants)
    kernel = variant.kernel.fn
    scope = interpreter._patch_lang(kernel)
    try:
        for program in programs:
            interpreter.interpreter_builder.set_grid_dim(program + 1, 1, 1)
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
            with _silent():
                kernel(**typed)
    finally:
        scope.restore()


def _typed(value: int, kind: str) -> tl.tensor:
    to = tl.str_to_ty(kind, None)
    bits = np.uint64 if kind.startswith("*") else interpreter._get_np_dtype(to)
    return tl.tensor(interpreter.TensorHandle(np.array([value], bits), to), to)


@contextmanager
def interpreted_gpu() -> Iterator[Launches]:
    """CPU tensors count as a GPU's, whose kernels run in the interpreter, with exact casts, inside of tensors."""
    launches = Launches()
    attributes: dict[tuple[Any, str], Any] = {(dispatch, "is_on_gpu"): lambda tensor: True}
    attributes |= {(Tensor, "data_ptr"): lambda tensor: launches.memory.address_of(tensor)}  # noqa: PLW0108  # or it would not be a method
    attributes |= {(module, "launch_of"): launches.launch_of for module in (packing, device_launch)}
    attributes |= {(module, "arch_of"): lambda device: 90 for module in (packing, device_launch)}
    with _replaced(_exact() | attributes | _checked(launches.memory)):
        yield launches


def _load(plain: Any, memory: Memory) -> Any:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, "load")
        return plain(self, pointers, mask, *rest)

    return load


def _store(plain: Any, memory: Memory) -> Any:
    """Return a store that refuses to write an element twice, except int32 marks, which several programs may set."""

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        kind = pointers.get_element_ty()
        note = partial(memory.check, what="store") if kind == tl.int32 else memory.store
        note(pointers.data, mask.data, kind.primitive_bitwidth // 8)
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
