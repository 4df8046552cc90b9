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

from importlib import import_module
from typing import TYPE_CHECKING

from commrt.torch_import import prepare as _prepare

if TYPE_CHECKING:
    from commrt.adaptive import Adaptive, Progress, adaquant, dq
    from commrt.algorithms.backup import BackupWorkers
    from commrt.algorithms.direct import Direct
    from commrt.algorithms.double_tree import DoubleTree
    from commrt.algorithms.gossip import Gossip
    from commrt.algorithms.halving_doubling import HalvingDoubling
    from commrt.algorithms.local import LocalSGD, Mix, cocod, dasgd, diloco, noloco, streaming_diloco
    from commrt.algorithms.outer import HeavyBall, Nesterov, Outer, SlowMomentum
    from commrt.algorithms.ring import Ring, Rings
    from commrt.algorithms.sliced import Sliced
    from commrt.algorithms.torus import Torus2D
    from commrt.coding import Coding, Float8, Int2, Int4, Int8
    from commrt.errors import (
        CommrtError,
        DeadlineExceeded,
        DisagreementError,
        Evicted,
        PeerLost,
        QuorumLost,
        ScheduleError,
        TransportError,
        UsageError,
    )
    from commrt.membership.generations import Loss
    from commrt.proof.replay import prove, verify
    from commrt.runtime.init import init
    from commrt.runtime.work import Work
    from commrt.runtime.world import World
    from commrt.schedule import ADD, COPY, MIX, Algorithm, Schedule, Step, beside
    from commrt.tools.measuring.workload_of import workload_of
    from commrt.tools.planning.workload import Workload
    from commrt.training.attach import attach
    from commrt.training.backup_workers import reissued
    from commrt.training.ddp import DDPState, ddp_hook
    from commrt.training.replica import Replica, Stats, StepReport
    from commrt.training.ring_shuffle import RingShuffle
    from commrt.transport.protocol import Tag

__version__ = "0.1.0"

_HOMES = {
    "commrt.algorithms.backup": ("BackupWorkers",),
    "commrt.algorithms.direct": ("Direct",),
    "commrt.algorithms.double_tree": ("DoubleTree",),
    "commrt.algorithms.gossip": ("Gossip",),
    "commrt.algorithms.halving_doubling": ("HalvingDoubling",),
    "commrt.algorithms.local": ("LocalSGD", "Mix", "cocod", "dasgd", "diloco", "noloco", "streaming_diloco"),
    "commrt.algorithms.outer": ("HeavyBall", "Nesterov", "Outer", "SlowMomentum"),
    "commrt.algorithms.ring": ("Ring", "Rings"),
    "commrt.algorithms.sliced": ("Sliced",),
    "commrt.algorithms.torus": ("Torus2D",),
    "commrt.adaptive": ("Adaptive", "Progress", "adaquant", "dq"),
    "commrt.tools.planning.workload": ("Workload",),
    "commrt.coding": ("Coding", "Float8", "Int2", "Int4", "Int8"),
    "commrt.errors": (
        "CommrtError",
        "DeadlineExceeded",
        "DisagreementError",
        "Evicted",
        "PeerLost",
        "QuorumLost",
        "ScheduleError",
        "TransportError",
        "UsageError",
    ),
    "commrt.training.attach": ("attach",),
    "commrt.training.ring_shuffle": ("RingShuffle",),
    "commrt.tools.measuring.workload_of": ("workload_of",),
    "commrt.training.ddp": ("DDPState", "ddp_hook"),
    "commrt.training.backup_workers": ("reissued",),
    "commrt.training.replica": ("Replica", "Stats", "StepReport"),
    "commrt.schedule": ("ADD", "COPY", "MIX", "Algorithm", "Schedule", "Step", "beside"),
    "commrt.proof.replay": ("prove", "verify"),
    "commrt.membership.generations": ("Loss",),
    "commrt.runtime.init": ("init",),
    "commrt.transport.protocol": ("Tag",),
    "commrt.runtime.work": ("Work",),
    "commrt.runtime.world": ("World",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ADD",
    "COPY",
    "MIX",
    "Adaptive",
    "Algorithm",
    "BackupWorkers",
    "Coding",
    "CommrtError",
    "DDPState",
    "DeadlineExceeded",
    "Direct",
    "DisagreementError",
    "DoubleTree",
    "Evicted",
    "Float8",
    "Gossip",
    "HalvingDoubling",
    "HeavyBall",
    "Int2",
    "Int4",
    "Int8",
    "LocalSGD",
    "Loss",
    "Mix",
    "Nesterov",
    "Outer",
    "PeerLost",
    "Progress",
    "QuorumLost",
    "Replica",
    "Ring",
    "RingShuffle",
    "Rings",
    "Schedule",
    "ScheduleError",
    "Sliced",
    "SlowMomentum",
    "Stats",
    "Step",
    "StepReport",
    "Tag",
    "Torus2D",
    "TransportError",
    "UsageError",
    "Work",
    "Workload",
    "World",
    "adaquant",
    "attach",
    "beside",
    "cocod",
    "dasgd",
    "ddp_hook",
    "diloco",
    "dq",
    "init",
    "noloco",
    "prove",
    "reissued",
    "streaming_diloco",
    "verify",
    "workload_of",
]

_prepare()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'commrt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
