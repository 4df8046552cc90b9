# SPDX-License-Identifier: Apache-2.0
"""One transport made of several: for host memory, and for the rank's GPU.

Chooses by the device of the tensors, gives all transports one timeout, and ends them. The thread
that exchanges adds transports, between groups, and calls `bind`, `capture`, `share` and `wait`. The
thread that closes the world calls `close`. All else is for any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from commrt.errors import TransportError, UsageError
from commrt.transport.protocol import CPU, Exchange, P2PGroup, Transport, Window


class TransportByDevice(Transport):
    """Runs groups on `host`, or on the transport of a GPU for tensors that lie on it.

    `kind` has the names of all; `members`, `one_host` and `can_move_receives` are those of `host`.
    `add` writes all four anew, and nothing else does.
    """

    def __init__(self, host: Transport, places: int | None = None) -> None:
        """There are more `places` than members of `host` if ranks may come later."""
        self.rank = host.rank
        self._timeout_s = host.timeout_s
        self.places = len(host.members) if places is None else places
        """For how many ranks there is a place. Never changes."""
        self._by_device: dict[torch.device, Transport] = {}
        self.add(CPU, host)

    def add(self, device: torch.device, transport: Transport) -> None:
        """Use `transport` for tensors on `device`, and close the one before it.

        Groups that are bound already stay bound to that. Sets the `timeout_s` of `transport`.
        """
        before = self._by_device.get(device)
        transport.timeout_s = self._timeout_s
        self._by_device[device] = transport
        host = self._by_device[CPU]
        self.members = host.members
        self.one_host = host.one_host
        self.can_move_receives = host.can_move_receives
        self.kind = " and ".join(each.kind for each in reversed(self._by_device.values()))
        if before is not None:
            with suppress(TransportError):  # it was raised, or nobody waits for it any more
                before.close()

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs of this rank that have a transport."""
        return [device for device in self._by_device if device != CPU]

    def require_no_other(self, device: torch.device) -> None:
        """Raise `UsageError` if another GPU than `device` has a transport."""
        for other in self.gpus:
            if other != device:
                raise UsageError(
                    f"this rank exchanges on {other} already, and has one GPU: move the model to it"
                )

    @property
    def per_host(self) -> int:
        return self._by_device[CPU].per_host

    def kind_on(self, device: torch.device) -> str:
        """Return the name of the medium for tensors on `device`; raises `UsageError` if none."""
        return self._of(device).kind

    def reaches(self, device: torch.device) -> bool:
        """Return True if a transport can move tensors on `device`, or none is needed."""
        return device.type != "cuda" or device in self._by_device or self.places == 1

    @property
    def timeout_s(self) -> float:
        """The same for all transports: who sets it, on any thread, sets theirs."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        for transport in tuple(self._by_device.values()):
            transport.timeout_s = seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        return self._of(device).allocate(numel, dtype, device)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        return self._of(device).allocate_shared(numel, dtype, device)

    def bind(self, group: P2PGroup) -> Exchange:
        return self._of(_device(group)).bind(group)

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        return self._of(_device(group)).capture(work, group)

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        return self._of(buffers[0].device).share(buffers) if buffers else ()

    def _of(self, device: torch.device) -> Transport:
        if not self.reaches(device):
            raise UsageError(
                f"no transport for tensors on {device} yet: call world.connect({str(device)!r}) on"
                " every rank first, or attach() a model on that device"
            )
        return self._by_device.get(device, self._by_device[CPU])

    def wait(self) -> None:
        for transport in tuple(self._by_device.values()):  # another thread may add one
            transport.wait()

    def close(self) -> None:
        """Close all transports, and raise the error of one; nobody adds any meanwhile."""
        with ExitStack() as stack:
            for transport in self._by_device.values():
                stack.callback(transport.close)

    def abort(self) -> None:
        for transport in tuple(self._by_device.values()):
            transport.abort()

    def abort_host(self) -> None:
        """End what waits in host memory only; GPUs' transports keep errors that no call raised."""
        self._by_device[CPU].abort()


def _device(group: P2PGroup) -> torch.device:
    """Return where the tensors of `group` lie; raise `UsageError` for several devices."""
    devices = {message.data.device for message in (*group.sends, *group.recvs)} or {CPU}
    if len(devices) > 1:
        where = sorted(map(str, devices))
        raise UsageError(f"hop {group.hop}: its tensors lie on {where}: move them to one device")
    return devices.pop()
