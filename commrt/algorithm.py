# SPDX-License-Identifier: Apache-2.0
"""What `attach` takes as its algorithm: what gives the schedules, and what trains with them.

An interface only. Any thread may ask for a schedule, as no call changes an algorithm.
"""

from __future__ import annotations

from typing import Protocol

from commrt.schedule import Schedule

SYNCHRONOUS = "commrt.training.synchronous"
"""The module that trains by an all-reduce of gradients."""


class Algorithm(Protocol):
    """What `attach` takes as its algorithm: it gives the schedule of each training step.

    `schedule` is a pure function of the object's fields, the step and the rank count, so every rank
    computes the same schedule. Implementations are small frozen dataclasses, so their ``repr`` says
    everything. For equal arguments they return the same object (use ``functools.lru_cache``),
    because programs are bound once per object.

    An algorithm that is more than an all-reduce of gradients also has some of these:

    - ``trained_by``: the module whose ``attach(request)`` makes the replica (default:
      `SYNCHRONOUS`);
    - ``mixing_row``: its schedules mix, after they have averaged over rows of so many ranks;
    - ``traits``: what `commrt.options` calls it.
    """

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the schedule of training step `step` on `ranks` ranks, numbered from 0."""
        ...
