# SPDX-License-Identifier: Apache-2.0
"""Train with backup workers: the vote, late ranks that catch up, and processes that replace dead ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.lazy import names_in

if TYPE_CHECKING:
    from commrt.algorithms.backup import BackupWorkers
    from commrt.backup_workers.backup_replica import reissued

_HOMES = {
    "commrt.algorithms.backup": ("BackupWorkers",),
    "commrt.backup_workers.backup_replica": ("reissued",),
}

__all__ = ["BackupWorkers", "reissued"]

__getattr__ = names_in(__name__, _HOMES)
