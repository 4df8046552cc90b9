# SPDX-License-Identifier: Apache-2.0
"""New connections among those who are left, while all of them live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from commrt.errors import PeerLost, Place
from commrt.store.asking import begun
from commrt.transport.media import Media, Queueing
from commrt.transport.protocol import Transport

__all__ = ["Connect", "ConnectGpu", "Means", "reconnect"]

T = TypeVar("T")

LOOK_S = 0.1
"""Between two looks at who lives."""

Connect = Callable[[int, Sequence[int], float], Transport]
"""(generation, members, timeout_s) -> what carries host memory among them; collective, once in each generation."""
ConnectGpu = Callable[[str, torch.device], Queueing]
"""(name, device) -> what carries that GPU's memory among the members; collective, each name once."""


class Means(NamedTuple):
    """What it takes to go on without a rank."""

    connect: Connect
    towards: str | None = None
    """An address in the network through which the ranks see each other; None if nobody needs to look."""


def reconnect(
    transport: Media,
    connect: Connect,
    connect_gpu: ConnectGpu,
    generation: int,
    members: Sequence[int],
    is_over: Callable[[], bool],
) -> None:
    """Let `transport` exchange with `members`; what was bound before stays broken. Collective.

    Raises `PeerLost` once it `is_over` with this generation, and lets it wait for who is gone.
    """

    def made(kind: Callable[[], T]) -> T:
        answer = begun(kind)
        while not answer.given:
            with suppress(TimeoutError):
                answer.error(LOOK_S)
            if not answer.given and is_over():
                raise PeerLost("a rank was lost while those who are left connected", Place(transport.rank))
        return answer.result()

    timeout_s = transport.timeout_s
    transport.replace_host(made(lambda: connect(generation, members, timeout_s)))
    for device in transport.gpus:
        transport.add(device, made(partial(connect_gpu, f"generation {generation}", device)))
