# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed: import this, then ``init_process_group("commrt")``; torch 2.14 imports it itself.

DDP, FSDP2, DTensor, DeviceMesh and everything else that uses torch.distributed then runs on commrt's schedules.
"""

import torch
import torch.distributed as dist
from packaging.version import Version

from commrt.c10d.methods import NAME

__all__ = ["NAME", "register"]

BACKENDS_SINCE = Version("2.14")
"""Earlier versions of torch take process groups written in Python, and no backends."""


def register() -> None:
    """Tell torch.distributed of the backend, unless that was done."""
    if Version(torch.__version__) >= BACKENDS_SINCE:
        from commrt.c10d.backend import create  # noqa: PLC0415  # each needs its own version of torch
    else:
        from commrt.c10d.process_group import create  # type: ignore[assignment]  # noqa: PLC0415
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001  # torch refuses a second registration
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


register()
