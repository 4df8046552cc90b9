# SPDX-License-Identifier: Apache-2.0
"""The devices whose tensors a process group takes, and the backend that carries them there.

On the thread that makes the group; `use_backend` writes to torch's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup


def group_devices() -> list[torch.device]:
    """Return the kinds of devices whose tensors a group takes."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(kind) for kind in kinds]


def use_backend(group: ProcessGroup, backend: Any) -> None:
    """Let `backend` carry all that `group` does."""
    for device in group_devices():
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, backend)  # noqa: SLF001  # as torch does
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)  # noqa: SLF001
