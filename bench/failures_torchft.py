# SPDX-License-Identifier: Apache-2.0
"""Train with torchft: each rank is a replica group of one process, which copies the weights of another to join."""

from __future__ import annotations

import os
from datetime import timedelta
from time import sleep
from typing import Any

import torch.distributed as dist
from failures_worker import Reporter, fresh
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from commrt.store.launcher import LOOPBACK

__all__ = ["lighthouse", "train"]

HEARTBEAT_MS, JOIN_MS, TICK_MS = 1000, 1000, 10
"""The lighthouse's limits for a replica to be heard of, and to join; how often it looks. Its defaults are longer."""


def lighthouse() -> LighthouseServer:
    """Return the server through which replicas find each other; the parent holds it."""
    return LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=1,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )


def train(reporter: Reporter) -> None:
    """Train as one replica, to the last step."""
    job, limit = reporter.job, timedelta(seconds=reporter.job.timeout_s)
    model, optimizer = fresh(job.seed)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(limit),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica{reporter.rank}",
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        timeout=limit,
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=limit,
        hostname=LOOPBACK,
        init_sync=False,
    )
    steps, replicated = Optimizer(manager, optimizer), DistributedDataParallel(manager, model)
    _await_all(reporter)
    reporter.note("ready", step=manager.current_step())
    while (step := manager.current_step()) < job.steps:
        steps.zero_grad()
        x, y = reporter.batch(step)
        loss = cross_entropy(replicated(x), y)
        reporter.compute(step)
        loss.backward()
        takes_part = manager.is_participating()
        steps.step()
        if manager.current_step() > step and takes_part:
            reporter.counted(step, [reporter.rank])
    reporter.done()
    reporter.save_final(model)
    manager.shutdown(wait=False)


def _await_all(reporter: Reporter) -> None:
    """Wait until all replicas of the start are there; otherwise the first ones begin without the others."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("replicas", 1)
    while store.add("replicas", 0) < reporter.job.ranks:
        sleep(0.01)
