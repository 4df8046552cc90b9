# SPDX-License-Identifier: Apache-2.0
"""The process group that torch 2.13 gets from ``init_process_group("commrt")``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commrt.c10d.group import Group, group_of
from commrt.c10d.methods import NAME, Methods
from commrt.c10d.requests import Requests

__all__ = ["CommrtProcessGroup", "create"]


class CommrtProcessGroup(Methods, ProcessGroup):  # type: ignore[misc]  # of torch's overloads, we take one
    """A process group whose collectives run proven schedules. Its methods are those of `Methods` and of torch."""

    def __init__(self, group: Group) -> None:
        ProcessGroup.__init__(self, group.world.rank, group.world.size)  # type: ignore[call-arg]  # the stub lacks it
        self.group = group
        self.requests = Requests(group.world.rank, group.world.size)
        self._names = {"name": "", "desc": ""}

    def size(self) -> int:
        """Return the number of ranks."""
        return self.requests.size

    def rank(self) -> int:
        """Return this rank in the group."""
        return self.requests.rank

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815  # C++ calls this one

    def getGroupName(self) -> str:  # noqa: N802  # C++'s names, here and below
        """Return the name that torch gave the group."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives the group."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch gave the group."""
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take the description that torch gives the group."""
        self._names["desc"] = desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of all later collectives."""
        self.group.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish what was started, then close all connections; ``destroy_process_group`` calls it."""
        self.group.close()

    def abort(self) -> None:
        """End all collectives that are under way with an error, then close all connections."""
        self.group.abort()
        self.group.close()

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block whose collectives torch waits for as one; they run in order anyway."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return a work that is complete when all earlier calls are."""
        return self.after_all()


def create(options: Any, _: Any = None) -> CommrtProcessGroup:
    """Return the process group that torch asks for in `options`, a ``_DistributedBackendOptions``. Collective."""
    return CommrtProcessGroup(group_of(options))
