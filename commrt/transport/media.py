# SPDX-License-Identifier: Apache-2.0
"""One rank's transports as one: where its tensors lie decides what carries a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.transport.protocol import CPU, Exchange, Group, Transport

__all__ = ["Media", "Queueing"]


class Queueing(Transport, Protocol):
    """A transport whose exchanges return before they have happened."""

    def wait(self) -> None:
        """Wait until all of them have; raises what ended one and nobody was told of."""
        ...


class Media:
    """`host` for all memory, until a GPU has a transport of its own; a `Transport`."""

    def __init__(self, host: Transport) -> None:
        self._host = host
        self._gpus: dict[torch.device, Queueing] = {}
        self.rank, self.ranks = host.rank, len(host.members)

    @property
    def members(self) -> Sequence[int]:
        """See `Transport.members`."""
        return self._host.members

    @property
    def gpus(self) -> Sequence[torch.device]:
        """Those that have a transport of their own."""
        return tuple(self._gpus)

    def replace_host(self, host: Transport) -> None:
        """Let `host` carry what lies in this process's memory from now on; what was bound before stays as it is."""
        host.timeout_s = self.timeout_s
        before, self._host = self._host, host
        before.close()

    def add(self, device: torch.device, transport: Queueing) -> None:
        """Let `transport` carry what lies on `device`."""
        self._gpus[device] = transport

    def require_no_other(self, device: torch.device) -> None:
        """Raise `UsageError` if another GPU than `device` has a transport."""
        for other in self._gpus:
            if other != device:
                raise UsageError(f"this rank exchanges on {other} already, and has one GPU: move the model to it")

    def wait(self) -> None:
        """Wait for what GPUs have queued; raises what ended it."""
        for transport in self._gpus.values():
            transport.wait()

    def reaches(self, device: torch.device) -> bool:
        """True if what lies on `device` need not be refused."""
        return device.type != "cuda" or device in self._gpus or self.ranks == 1

    @property
    def kind(self) -> str:
        """What moves bytes, in a word or two."""
        return " and ".join(transport.kind for transport in self._all())

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`; one for all."""
        return self._host.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        for transport in self._all():
            transport.timeout_s = seconds

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`."""
        return self._of(device).allocate(numel, dtype, device)

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`; raises `UsageError` for tensors on different devices."""
        return self._of(_device(group)).bind(group)

    def capture(self, work: Callable[[], None], group: Group) -> Exchange | None:
        """See `Transport.capture`; as `bind`."""
        return self._of(_device(group)).capture(work, group)

    def _of(self, device: torch.device) -> Transport:
        if not self.reaches(device):
            raise UsageError(
                f"nothing carries tensors on {device} yet: call world.connect({str(device)!r}) on every rank first, or "
                "attach() a model that lies there"
            )
        return self._gpus.get(device, self._host)

    def close(self) -> None:
        """See `Transport.close`; closes all, and raises the first error after that."""
        errors = []
        for transport in self._all():
            try:
                transport.close()
            except Exception as error:  # the others must be closed too
                errors.append(error)
        if errors:
            raise errors[0]

    def abort(self) -> None:
        """See `Transport.abort`."""
        for transport in self._all():
            transport.abort()

    def _all(self) -> tuple[Transport, ...]:
        return (*self._gpus.values(), self._host)


def _device(group: Group) -> torch.device:
    devices = {parcel.data.device for parcel in (*group.sends, *group.recvs)} or {CPU}
    if len(devices) > 1:
        where = sorted(map(str, devices))
        raise UsageError(f"hop {group.hop}: its tensors lie on {where}: move them to one device")
    return devices.pop()
