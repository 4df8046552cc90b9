# SPDX-License-Identifier: Apache-2.0
from commrt.backup_workers.backup_step import reissued as reissued
from commrt.backup_workers.policy import BackupWorkers as BackupWorkers
