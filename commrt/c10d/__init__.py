# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed: ``init_process_group("commrt")``.

DDP, FSDP2, DTensor, DeviceMesh and everything else that uses torch.distributed then runs on
commrt's schedules. The import of this package tells torch of the backend, for the whole process.
torch does that itself where commrt is installed, through an entry point.
"""

from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from commrt.c10d.name import NAME
from commrt.errors import CommrtError

__all__ = ["NAME", "create", "register"]

BACKENDS_SINCE = Version("2.14")
"""Earlier versions of torch take process groups written in Python, and no backends."""


def register() -> None:
    """Tell torch.distributed, if this torch has that, of the backend, unless that was done."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:  # noqa: SLF001  # torch refuses a second one
        return
    devices = ["cpu", "cuda"]  # as of Gloo: to count GPUs while torch is imported may start CUDA
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def create(options: Any, _: Any = None) -> Any:
    """Return the backend or process group that torch asks for in ``_DistributedBackendOptions``.

    Errors of commrt are also ``torch.distributed.DistBackendError``.
    """
    from commrt.c10d.dist_errors import as_dist_error  # noqa: PLC0415  # a torch may have no torch.distributed

    if getattr(options, "enable_reconfigure", False):
        # each needs its own version
        from commrt.c10d.reconfigurable import ReconfigurableGroup as Kind  # noqa: PLC0415
    elif Version(torch.__version__) >= BACKENDS_SINCE:
        from commrt.c10d.backend import CommrtBackend as Kind  # type: ignore[assignment]  # noqa: PLC0415
    else:
        from commrt.c10d.process_group import CommrtProcessGroup as Kind  # type: ignore[assignment]  # noqa: PLC0415
    try:
        return Kind(options)
    except CommrtError as error:
        raise as_dist_error(error) from error.__cause__


register()
