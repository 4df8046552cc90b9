# SPDX-License-Identifier: Apache-2.0
"""What several commands say of prices, in words: the cluster, what is gained, what coding takes."""

from __future__ import annotations

from commrt.pricing.cluster import Cluster


def about(cluster: Cluster) -> str:
    """Return the line that says what is described."""
    return f"{cluster.name}: {' '.join(cluster.about.split())}"


def gains(seconds: float, latency_s: float, digits: int) -> str:
    """Return in words what is saved of a time, and which part of it is latencies.

    >>> gains(0.003, 0.004, digits=0)
    '4 ms less for latencies and 1 ms more for bytes'
    """
    less_ms = {"latencies": 1e3 * latency_s, "bytes": 1e3 * (seconds - latency_s)}
    sides = [
        f"{abs(ms):.{digits}f} ms {'less' if ms >= 0 else 'more'} for {what}"
        for what, ms in less_ms.items()
    ]
    return " and ".join(sides)


def quantizer_sentence(seconds: float, cluster: Cluster) -> str:
    """Return what of the price is for turning values into codes and back."""
    if cluster.code_gbytes_per_s is None:
        return (
            f"quantizing is taken to need no time: {cluster.name} has no code_gbytes_per_s; commrt"
            " probe measures it"
        )
    return f"{1e3 * seconds:.3f} ms of it is for turning values into codes and back"
