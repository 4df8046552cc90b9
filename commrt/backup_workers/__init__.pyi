# SPDX-License-Identifier: Apache-2.0
from commrt.backup_workers.dropped_batches import reissued as reissued
from commrt.backup_workers.policy import BackupWorkers as BackupWorkers
