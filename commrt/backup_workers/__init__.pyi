# SPDX-License-Identifier: Apache-2.0
from commrt.algorithms.backup import BackupWorkers as BackupWorkers
from commrt.backup_workers.backup_step import reissued as reissued
