# SPDX-License-Identifier: Apache-2.0
"""A communication runtime for data-parallel training: collectives as schedules that are proven, then run.

::

    import commrt

    world = commrt.init()
    replica = commrt.attach(model, optimizer, algorithm=commrt.Torus2D())

The rest of the loop stays plain PyTorch. Names are imported when first used, so ``import commrt`` needs
neither torch nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in
from commrt.torch_import import prepare as _prepare

if TYPE_CHECKING:
    from commrt.algorithms.backup import BackupWorkers
    from commrt.algorithms.direct import Direct
    from commrt.algorithms.gossip import Gossip
    from commrt.algorithms.halving_doubling import HalvingDoubling
    from commrt.algorithms.ring import Ring
    from commrt.algorithms.torus import Torus2D
    from commrt.errors import (
        CommrtError,
        DeadlineExceeded,
        DisagreementError,
        PeerLost,
        ScheduleError,
        TransportError,
        UsageError,
    )
    from commrt.proof.replay import prove
    from commrt.runtime.init import init
    from commrt.runtime.work import Work
    from commrt.runtime.world import World
    from commrt.schedule import ADD, COPY, MIX, Algorithm, Schedule, Step, beside
    from commrt.training.attach import attach
    from commrt.training.ddp import DDPState, ddp_hook
    from commrt.training.replica import Replica
    from commrt.training.ring_shuffle import RingShuffle
    from commrt.transport.protocol import Tag

__version__ = "0.1.0"

_HOMES = {
    "commrt.algorithms.backup": ("BackupWorkers",),
    "commrt.algorithms.direct": ("Direct",),
    "commrt.algorithms.gossip": ("Gossip",),
    "commrt.algorithms.halving_doubling": ("HalvingDoubling",),
    "commrt.algorithms.ring": ("Ring",),
    "commrt.algorithms.torus": ("Torus2D",),
    "commrt.errors": (
        "CommrtError",
        "DeadlineExceeded",
        "DisagreementError",
        "PeerLost",
        "ScheduleError",
        "TransportError",
        "UsageError",
    ),
    "commrt.proof.replay": ("prove",),
    "commrt.runtime.init": ("init",),
    "commrt.runtime.work": ("Work",),
    "commrt.runtime.world": ("World",),
    "commrt.schedule": (
        "ADD",
        "COPY",
        "MIX",
        "Algorithm",
        "Schedule",
        "Step",
        "beside",
    ),
    "commrt.training.attach": ("attach",),
    "commrt.training.ddp": (
        "DDPState",
        "ddp_hook",
    ),
    "commrt.training.replica": ("Replica",),
    "commrt.training.ring_shuffle": ("RingShuffle",),
    "commrt.transport.protocol": ("Tag",),
}
_ROOMS = [
    "algorithms",
    "backup_workers",
    "elastic",
    "local_sgd",
    "proof",
    "quantization",
    "testing",
    "tools",
    "training",
]
"""Packages with names for options, algorithms, tools and tests."""

__all__ = [
    "ADD",
    "COPY",
    "MIX",
    "Algorithm",
    "BackupWorkers",
    "CommrtError",
    "DDPState",
    "DeadlineExceeded",
    "Direct",
    "DisagreementError",
    "Gossip",
    "HalvingDoubling",
    "PeerLost",
    "Replica",
    "Ring",
    "RingShuffle",
    "Schedule",
    "ScheduleError",
    "Step",
    "Tag",
    "Torus2D",
    "TransportError",
    "UsageError",
    "Work",
    "World",
    "attach",
    "beside",
    "ddp_hook",
    "init",
    "prove",
]

_prepare()

__getattr__ = names_in(__name__, _HOMES, _ROOMS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
