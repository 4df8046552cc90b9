# SPDX-License-Identifier: Apache-2.0
from commrt.algorithms.backup import BackupWorkers as BackupWorkers
from commrt.backup_workers.backup_replica import reissued as reissued
