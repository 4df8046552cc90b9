# SPDX-License-Identifier: Apache-2.0
"""Connect the members of a new generation, unless one of them is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from commrt.elastic.generations import Generation
from commrt.errors import PeerLost, Place
from commrt.runtime.connection import ConnectGpu, ReconnectOptions
from commrt.store.client import start_call
from commrt.transport.by_device import TransportByDevice

__all__ = ["Reconnector"]

T = TypeVar("T")
PROBE_EVERY_S = 0.1
"""Between two liveness checks while connecting."""


class Reconnector:
    """Gives a transport connections among the members of a new generation. Used on the communication thread."""

    def __init__(
        self, transport: TransportByDevice, reconnect_options: ReconnectOptions | None, connect_gpu: ConnectGpu
    ) -> None:
        self._transport, self._connect_gpu = transport, connect_gpu
        self.options = reconnect_options
        """None in a world that cannot connect again, and after it was closed."""

    def connect(self, generation: Generation, is_over: Callable[[], bool]) -> None:
        """Connect the members of `generation`, for host memory and each GPU; collective.

        Raises `PeerLost` once `is_over` returns True, and what connecting raises.
        """
        transport, members = self._transport, generation.ranks
        if self.options is None or len(members) == 1:
            return
        timeout_s, connect = transport.timeout_s, self.options.connect
        transport.replace_host(self._unless(is_over, lambda: connect(generation.number, members, timeout_s)))
        for device in transport.gpus:
            made = partial(self._connect_gpu, f"generation {generation.number}", device)
            transport.add(device, self._unless(is_over, made))

    def _unless(self, is_over: Callable[[], bool], connect: Callable[[], T]) -> T:
        future = start_call(connect)
        while not future.done():
            with suppress(TimeoutError):
                future.exception(PROBE_EVERY_S)
            if not future.done() and is_over():
                raise PeerLost("a rank was lost while the members connected", Place(self._transport.rank))
        return future.result()
