# SPDX-License-Identifier: Apache-2.0
"""Times of variants that were measured interleaved in one run: statistics and tables.

On a shared machine a time says little. The ratio of two times within a second says more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Clock", "Times", "spread", "table"]

PER_S = {"ms": 1e3, "us": 1e6}
Times = dict[str, list[float]]
"""Seconds of each variant, one entry per round. The i-th entries of all variants are of one round."""


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile."""
    low, middle, high = np.quantile(values, (0.2, 0.5, 0.8)).tolist()
    return low, middle, high


def ratios(times: Times, variant: str, peer: str) -> list[float]:
    """Return the time of `variant` over that of `peer`, for each round."""
    return [own / other for own, other in zip(times[variant], times[peer], strict=True)]


def record(times: Times, variant: str, peer: str) -> dict[str, float | int | str]:
    """Return the record of `variant`: its times, and its ratio to `peer`."""
    low, middle, high = spread(times[variant])
    ratio_low, ratio, ratio_high = spread(ratios(times, variant, peer))
    return {
        "rounds": len(times[variant]),
        "median_s": middle,
        "quantile20_s": low,
        "quantile80_s": high,
        "peer": peer,
        "ratio": ratio,
        "ratio_quantile20": ratio_low,
        "ratio_quantile80": ratio_high,
    }


def table(times: Times, peers: dict[str, str], unit: str = "ms") -> str:
    """Return a table, one line per variant: its times and its ratio to its peer, medians with percentiles."""
    lines = [f"{'variant':28} {unit + ': 20 %':>9} {'median':>8} {'80 %':>8}   ratio: median (20 %..80 %) to"]
    for variant, peer in peers.items():
        row = record(times, variant, peer)
        each = " ".join(f"{PER_S[unit] * float(row[k]):8.1f}" for k in ("quantile20_s", "median_s", "quantile80_s"))
        ratio = f"{row['ratio']:.2f} ({row['ratio_quantile20']:.2f}..{row['ratio_quantile80']:.2f}) {peer}"
        lines.append(f"{variant:28}  {each}          {ratio}")
    return "\n".join(lines)


@dataclass
class Clock:
    """A clock that replays times measured elsewhere, so that pytest-benchmark can report them."""

    now_s: float = 0.0
    _coming: list[float] = field(default_factory=list)

    def replay(self, seconds: list[float]) -> Callable[[], None]:
        """Return a function whose i-th call takes ``seconds[i]`` on this clock."""
        self._coming = list(seconds)

        def elapse() -> None:
            self.now_s += self._coming.pop(0)

        return elapse
