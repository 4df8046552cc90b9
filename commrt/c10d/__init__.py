# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed: ``import commrt``, then ``init_process_group("commrt")``.

DDP, FSDP2, DTensor, DeviceMesh and everything else that uses torch.distributed then runs on
commrt's schedules.
"""

from typing import Any

import torch
from packaging.version import Version

from commrt.errors import CommrtError
from commrt.importing import NAME, register

__all__ = ["NAME", "create", "register"]

BACKENDS_SINCE = Version("2.14")
"""Earlier versions of torch take process groups written in Python, and no backends."""


def create(options: Any, _: Any = None) -> Any:
    """Return what torch asks for in `options`, a ``_DistributedBackendOptions``: a backend or a
    process group.

    Errors of commrt are also ``torch.distributed.DistBackendError``.
    """
    from commrt.c10d.group_work import as_dist_error  # noqa: PLC0415  # imports the runtime

    if getattr(options, "enable_reconfigure", False):
        from commrt.c10d.reconfigurable import (  # noqa: PLC0415
            ReconfigurableGroup as Kind,
        )  # each needs its own version
    elif Version(torch.__version__) >= BACKENDS_SINCE:
        from commrt.c10d.backend import CommrtBackend as Kind  # type: ignore[assignment]  # noqa: PLC0415
    else:
        from commrt.c10d.process_group import CommrtProcessGroup as Kind  # type: ignore[assignment]  # noqa: PLC0415
    try:
        return Kind(options)
    except CommrtError as error:
        as_dist_error(error)
        raise


register()
