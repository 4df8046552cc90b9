# SPDX-License-Identifier: Apache-2.0
"""New connections among the members of a generation, given up as soon as one of them is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from commrt.errors import PeerLost, Place
from commrt.membership.generations import Generation
from commrt.membership.store_client import start_call
from commrt.transport.media import Media, Queueing
from commrt.transport.protocol import Transport

__all__ = ["Connect", "ConnectGpu", "Means", "Reconnector"]

T = TypeVar("T")
PROBE_EVERY_S = 0.1
"""Between two liveness checks while connecting."""

Connect = Callable[[int, Sequence[int], float], Transport]
"""(generation, members, timeout_s) -> a transport for host memory among them; collective, once per generation."""
ConnectGpu = Callable[[str, torch.device], Queueing]
"""(name, device) -> a transport for that GPU's memory among the members; collective, each name once."""


class Means(NamedTuple):
    """What a world needs to go on without a rank."""

    connect: Connect
    towards: str | None = None
    """An address in the network through which the ranks see each other; None if they need no liveness checks."""


class Reconnector:
    """Gives a transport connections among the members of a new generation. Used on the communication thread."""

    def __init__(self, transport: Media, means: Means | None, connect_gpu: ConnectGpu) -> None:
        self._transport, self._connect_gpu = transport, connect_gpu
        self.means = means
        """None in a world that cannot connect again, and after it was closed."""

    def connect(self, generation: Generation, is_over: Callable[[], bool]) -> None:
        """Connect the members of `generation`, for host memory and each GPU; collective.

        Raises `PeerLost` once `is_over` returns True, and what connecting raises.
        """
        transport, members = self._transport, generation.ranks
        if self.means is None or len(members) == 1:
            return
        timeout_s, connect = transport.timeout_s, self.means.connect
        transport.replace_host(self._unless(is_over, lambda: connect(generation.number, members, timeout_s)))
        for device in transport.gpus:
            made = partial(self._connect_gpu, f"generation {generation.number}", device)
            transport.add(device, self._unless(is_over, made))

    def _unless(self, is_over: Callable[[], bool], connect: Callable[[], T]) -> T:
        future = start_call(connect)
        while not future.given:
            with suppress(TimeoutError):
                future.error(PROBE_EVERY_S)
            if not future.given and is_over():
                raise PeerLost("a rank was lost while the members connected", Place(self._transport.rank))
        return future.result()
