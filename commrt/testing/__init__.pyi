# SPDX-License-Identifier: Apache-2.0
from commrt.testing.processes import free_port as free_port
from commrt.testing.processes import run_processes as run_processes
from commrt.testing.ranks import local_worlds as local_worlds
from commrt.testing.ranks import run_ranks as run_ranks
from commrt.testing.spawning import spawn as spawn
from commrt.testing.workers import run_workers as run_workers
