# SPDX-License-Identifier: Apache-2.0
"""Compare the simulator with reality: ``sudo python bench/compare_simulator.py`` (Linux, iproute2).

Each rank is a process in its own network namespace. A bridge joins the ranks through links of limited rate (a token
bucket at each end). `commrt.tools.measuring.probing` measures that network. Then schedules are priced on the result,
and run. The table shows the predicted time of an exchange, the median of the measured ones, and their spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter

import torch
from network_hosts import Cabling, cluster, missing, output_of_first

import commrt
from commrt.algorithms.catalogue import by_name
from commrt.pricing.price import Pricing
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.tools.measuring.probing import all_gather, probe
from commrt.transport.protocol import Tag

NAMES = ("ring", "torus2d", "gossip")
SIZES = (256 << 10, 1 << 20, 4 << 20)
REPEATS, WARM, IN_A_ROW = 7, 1, 5


@dataclass(frozen=True)
class Row:
    """One exchange, predicted and measured."""

    name: str
    nbytes: int
    predicted_ms: float
    measured_ms: float
    low_ms: float
    high_ms: float

    @property
    def off(self) -> float:
        """The relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1


def work() -> None:
    """Probe and measure on one rank; rank 0 prints the results."""
    torch.set_num_threads(1)
    with commrt.init(120.0) as world:
        found = probe(world)
        rows = []
        for name in NAMES:
            schedule = by_name(name).schedule(0, world.size)
            pricing = Pricing(schedule, found)
            for nbytes in SIZES:
                times_s = measured_s(world, schedule, nbytes)
                low_s, _, high_s = quantiles(times_s, n=4)
                figures = (pricing.price(nbytes).seconds, median(times_s), low_s, high_s)
                rows.append(Row(name, nbytes, *(1e3 * each for each in figures)))
        if world.rank == 0:
            print(json.dumps({"cluster": asdict(found), "rows": [asdict(row) for row in rows]}), flush=True)


def measured_s(world: commrt.World, schedule: commrt.Schedule, nbytes: int) -> list[float]:
    """Return seconds per exchange in a row of exchanges, so that a late start does not count, on the slowest rank."""
    bound = bind(program(schedule, world.rank), torch.zeros(nbytes // 4), world.transport)

    def once() -> float:
        begin_s = perf_counter()
        for number in range(IN_A_ROW):
            bound.run(Tag(number, "reality"))
        return (perf_counter() - begin_s) / IN_A_ROW

    found = []
    for _ in range(REPEATS + WARM):
        world.agree("go")
        found.append(max(all_gather(world, world.comm_thread.submit(once).result())))
    return found[WARM:]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--rate", type=float, default=200.0, help="rate of each link, in Mbit/s each way")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if why := missing():
        sys.exit(f"nothing was measured: {why}")
    with cluster(Cabling(options.ranks, options.rate)):
        said = json.loads(output_of_first([__file__, "--work"], options.ranks))
    if options.json:
        print(json.dumps(said))
        return
    show(said["cluster"], [Row(**row) for row in said["rows"]], options.rate)


def show(cluster: dict[str, dict[str, float]], rows: Sequence[Row], rate_mbit: float) -> None:
    """Print a table."""
    link = cluster["between"]
    probed = f"{link['latency_us']:.0f} us, {8 * link['gbytes_per_s'] * 1e3:.0f} Mbit/s"
    print(f"links of {rate_mbit:g} Mbit/s: probed {probed}")
    print("| exchange | KiB | predicted, ms | measured, ms (quartiles) | off |\n|---|---|---|---|---|")
    for row in rows:
        spread = f"{row.measured_ms:.1f} ({row.low_ms:.1f} to {row.high_ms:.1f})"
        print(f"| {row.name} | {row.nbytes >> 10:,} | {row.predicted_ms:.1f} | {spread} | {row.off:+.0%} |")


if __name__ == "__main__":
    main()
