# SPDX-License-Identifier: Apache-2.0
"""Check every way of training and the backend of torch.distributed on this machine's GPUs, and time the host.

Without a GPU the ranks run on the CPU, which shows that this file runs.
"""

from __future__ import annotations

import gpu_systems
import pytest
from gpu_timer import HAS_GPU
from records import made
from test_ranks import LIMIT_S, MIB_NUMEL, run_processes, values

STEPS = 40 if HAS_GPU else 8
BACKUP = "backup workers"
OWN_WEIGHTS = {"gossip", "fp64, gossip", "local SGD"}
"""Ways in which ranks differ between two averages."""


def tolerance(way: str) -> float:
    """Return how far the device may end from the CPU: a code rounds what differs in its last bit to another code."""
    return 5e-2 if "-bit" in way or "fp8" in way else 1e-2 if "bf16" in way else 1e-3


@pytest.fixture(scope="module")
def ended() -> dict[str, list]:
    """Return what each rank says of each way; three ranks for backup workers, two for the others."""
    others = [way for way in gpu_systems.WAYS if way != BACKUP]
    found = {}
    for ranks, ways in ((2, others), (3, [BACKUP])):
        each = values(run_processes(ranks, gpu_systems.train, ways, STEPS, limit_s=LIMIT_S))
        found |= {way: [one[way] for one in each] for way in ways}
    return found


@pytest.mark.parametrize("way", gpu_systems.WAYS)
def test_each_way_of_training_learns_and_ends_where_the_cpu_ends(way, ended, record_property):
    for run in ended[way]:
        assert not isinstance(run, str)
        record_property("distance from the CPU, replicas equal, last losses, first loss", list(run))
        assert run.loss < run.first_loss
        assert way in OWN_WEIGHTS or run.equal
        assert way == BACKUP or run.distance < tolerance(way)


def test_the_backend_of_torch_distributed_gives_the_right_results():
    assert values(run_processes(3, gpu_systems.backend, [5, 100_003], limit_s=LIMIT_S)) == [[]] * 3


@pytest.mark.parametrize("mib", [1, 25])
def test_the_host_queues_an_exchange_beside_batch_isend_irecv(mib, record_property):
    each = values(run_processes(2, gpu_systems.host, mib * MIB_NUMEL, 100 if HAS_GPU else 3, limit_s=LIMIT_S))[0]
    for one in made("host", f"2 ranks, {mib} MiB", each, dict.fromkeys(each, gpu_systems.TORCH_SENT)):
        record_property(one["variant"], {key: one[key] for key in ("median_s", "ratio", "ratio_quantile80")})
