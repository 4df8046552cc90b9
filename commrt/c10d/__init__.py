# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed: import this, then ``init_process_group("commrt")``.

DDP, FSDP2, DTensor, DeviceMesh and everything else that uses torch.distributed then runs on commrt's schedules.
"""

import torch.distributed as dist

from commrt.c10d.process_group import NAME, create

if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001  # torch refuses a second registration
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
