# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of the time of an exchange on a cluster, whatever its schedule is.

Pure arithmetic.
"""

from __future__ import annotations

from math import ceil

from commrt.pricing.cluster import Cluster


def all_reduce_bound_s(cluster: Cluster, ranks: int, nbytes: float) -> float:
    """Return a lower bound of the time to sum `nbytes`: what a rank, node or rack must send.

    Each of k equal parts sends at least 2 (k - 1) / k of the buffer, through all its ports
    together. One latency is added.
    """
    nodes = ceil(ranks / cluster.gpus_per_node)
    racks = 1 if cluster.racks is None else ceil(nodes / cluster.racks.nodes)
    per_rank = cluster.within.gbytes_per_s * 1e9 * (min(ranks, cluster.gpus_per_node) > 1)
    per_rank += cluster.rank_bytes_per_s * (nodes > 1)
    parts = [
        (ranks, per_rank),
        (nodes, cluster.node_bytes_per_s),
        (racks, cluster.rack_bytes_per_s),
    ]
    sent_s = max(
        (2 * (k - 1) / k * nbytes / bytes_per_s for k, bytes_per_s in parts if k > 1), default=0.0
    )
    return sent_s + _least_latency_s(cluster, ranks)


def exchange_bound_s(cluster: Cluster, ranks: int, nbytes: float) -> float:
    """Return a lower bound of the time to send `nbytes` to one other rank, as gossip does."""
    if ranks < 2:
        return 0.0
    speeds = [cluster.within.gbytes_per_s * 1e9] if cluster.gpus_per_node > 1 else []
    speeds += [cluster.rank_bytes_per_s] if ranks > cluster.gpus_per_node else []
    return nbytes / max(speeds) + _least_latency_s(cluster, ranks)


def _least_latency_s(cluster: Cluster, ranks: int) -> float:
    if ranks < 2:
        return 0.0
    within_us = cluster.within.latency_us
    between_us = cluster.between.latency_us
    return 1e-6 * (min(within_us, between_us) if ranks > cluster.gpus_per_node else within_us)
