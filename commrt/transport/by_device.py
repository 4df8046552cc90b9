# SPDX-License-Identifier: Apache-2.0
"""All transports of one rank as one: the device of a group's tensors decides which transport runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from commrt.errors import Place, TransportClosed, TransportError, UsageError
from commrt.transport.protocol import CPU, Exchange, P2PGroup, Transport, Window


class TransportByDevice(Transport):
    """Runs groups on `host`, or on the transport of a GPU for tensors that lie on it.

    `kind` has the names of all; `members`, `one_host` and `can_move_receives` are those of `host`.
    """

    def __init__(self, host: Transport) -> None:
        self.rank, self.ranks = host.rank, len(host.members)
        self._timeout_s = host.timeout_s
        self._gpus: dict[torch.device, Transport] = {}
        self._use(host)

    def _use(self, host: Transport) -> None:
        self._host, self.members = host, host.members
        self.one_host, self.can_move_receives = host.one_host, host.can_move_receives
        self.kind = " and ".join(transport.kind for transport in self._all())

    @property
    def gpus(self) -> Sequence[torch.device]:
        """GPUs that have a transport of their own."""
        return tuple(self._gpus)

    def replace_host(self, host: Transport) -> None:
        """Use `host` for tensors in host memory from now on, and close its predecessor; bound groups stay bound."""
        host.timeout_s, before = self._timeout_s, self._host
        self._use(host)
        before.close()

    def add(self, device: torch.device, transport: Transport) -> None:
        """Use `transport` for tensors on `device` from now on, and close its predecessor."""
        before = self._gpus.get(device)
        self._gpus[device] = transport
        self._use(self._host)
        if before is not None:
            with suppress(TransportError):  # it was raised, or nobody waits for it any more
                before.close()

    def require_no_other(self, device: torch.device) -> None:
        """Raise `UsageError` if another GPU than `device` has a transport."""
        for other in self._gpus:
            if other != device:
                raise UsageError(f"this rank exchanges on {other} already, and has one GPU: move the model to it")

    def reaches(self, device: torch.device) -> bool:
        """Return True if a transport can move tensors on `device`, or none is needed."""
        return device.type != "cuda" or device in self._gpus or self.ranks == 1

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`: the same for all transports."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        for transport in self._all():
            transport.timeout_s = seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`."""
        return self._of(device).allocate(numel, dtype, device)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate_shared`."""
        return self._of(device).allocate_shared(numel, dtype, device)

    def bind(self, group: P2PGroup) -> Exchange:
        """See `Transport.bind`; raises `UsageError` for tensors on different devices."""
        return self._of(_device(group)).bind(group)

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """See `Transport.capture`; raises `UsageError` for tensors on different devices."""
        return self._of(_device(group)).capture(work, group)

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        """See `Transport.share`; all on one device."""
        return self._of(buffers[0].device).share(buffers) if buffers else ()

    def _of(self, device: torch.device) -> Transport:
        if not self.reaches(device):
            raise UsageError(
                f"no transport for tensors on {device} yet: call world.connect({str(device)!r}) on every rank first, "
                "or attach() a model on that device"
            )
        return self._gpus.get(device, self._host)

    def wait(self) -> None:
        """See `Transport.wait`."""
        for transport in self._gpus.values():
            transport.wait()

    def close(self) -> None:
        """See `Transport.close`: closes all transports, and raises the error of one."""
        with ExitStack() as stack:
            for transport in reversed(self._all()):
                stack.callback(transport.close)

    def abort(self) -> None:
        """See `Transport.abort`."""
        for transport in self._all():
            transport.abort()

    def abort_host(self) -> None:
        """End what waits in host memory only; transports of GPUs keep the error that no call has raised yet."""
        self._host.abort()

    def _all(self) -> tuple[Transport, ...]:
        return (*self._gpus.values(), self._host)


def _device(group: P2PGroup) -> torch.device:
    devices = {message.data.device for message in (*group.sends, *group.recvs)} or {CPU}
    if len(devices) > 1:
        where = sorted(map(str, devices))
        raise UsageError(f"hop {group.hop}: its tensors lie on {where}: move them to one device")
    return devices.pop()


class NullTransport(Transport):
    """For a rank that the other ranks have not admitted yet: binding raises an error."""

    kind = "nothing yet"

    def __init__(self, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self.rank, self.members, self.timeout_s = rank, members, timeout_s

    def bind(self, group: P2PGroup) -> Exchange:
        """Raise `TransportClosed`."""
        raise TransportClosed("the other ranks have not admitted this rank yet", Place(self.rank))

    def close(self) -> None:
        """Do nothing."""

    abort = close
