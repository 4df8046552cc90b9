# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that other processes of the host can open: CUDA's interprocess communication.

Also host memory that the GPU writes to, and kernels that signal in both: all that a transport of
peers' memory asks of CUDA stands in one class, so that tests can do it in host memory. Any thread
may call; knows no ranks, and keeps no list of what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from commrt.kernels.dispatch import on_gpu
from commrt.kernels.signal_wait import SignalWaitPlan


class IpcMemory:
    """Memory of the GPU `device` that other processes of its host can map, and signals in it.

    A handle stands for a whole allocation of ``cudaMalloc``, so each segment is one. Neither
    torch's allocator nor CuPy's pool gives such memory.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy  # noqa: PLC0415  # slow to import, and absent without a GPU

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._device = device

    def allocate(self, nbytes: int) -> Any:
        """Return a segment, zeros uint8 [nbytes], by ``cudaMalloc``; may wait for the GPU."""
        with torch.cuda.device(self._device):
            memory = self._allocated(nbytes)
            self._runtime.memset(memory.ptr, 0, nbytes)
        self.synchronize()  # torch queues on streams of its own
        return self._array(memory, nbytes)

    def _allocated(self, nbytes: int) -> Any:
        """Return memory, even if torch must give some up; raise torch's ``OutOfMemoryError``."""
        try:
            return self._cupy.cuda.Memory(nbytes)
        except RuntimeError:  # CuPy's, of the driver
            torch.cuda.empty_cache()
        try:
            return self._cupy.cuda.Memory(nbytes)
        except RuntimeError as error:
            what = (
                f"{self._device} has no {nbytes:,} bytes left for a buffer that travels ({error})"
            )
            raise torch.OutOfMemoryError(what) from error

    def _array(self, memory: Any, nbytes: int) -> Any:
        return self._cupy.ndarray(
            nbytes, self._cupy.uint8, self._cupy.cuda.MemoryPointer(memory, 0)
        )

    def again(self, segment: Any) -> Any:
        """Return another array of the same memory, which keeps it alive."""
        return self._array(segment.data.mem, segment.nbytes)

    def handle(self, segment: Any) -> bytes:
        """Return what another process needs to open `segment`."""
        with torch.cuda.device(self._device):
            return bytes(self._runtime.ipcGetMemHandle(segment.data.ptr))

    def open(self, handle: bytes, nbytes: int) -> Any:
        """Return a peer's segment, uint8 [nbytes]; raise `RuntimeError` where that cannot be.

        The memory counts as this device's, wherever it is.
        """
        with torch.cuda.device(self._device):
            address = self._runtime.ipcOpenMemHandle(handle)
        memory = self._cupy.cuda.UnownedMemory(
            address, nbytes, owner=None, device_id=self._device.index
        )
        return self._array(memory, nbytes)

    def close(self, segment: Any) -> None:
        """Unmap a peer's segment, which nobody may use any more."""
        with torch.cuda.device(self._device):
            self._runtime.ipcCloseMemHandle(segment.data.ptr)

    def host_words(self, count: int) -> Tensor:
        """Return zeros int64 [count] in host memory that the device reads and writes."""
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)

    def signal_wait(self, plan: SignalWaitPlan) -> Callable[[], None]:
        """Return what queues `plan` at each call: one launch of one warp of a loaded kernel."""
        return cast("Callable[[], None]", on_gpu("signal_wait")(plan))

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._device)
