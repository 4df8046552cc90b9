# SPDX-License-Identifier: Apache-2.0
"""The simulator against reality: ``sudo python bench/against_reality.py`` (Linux, iproute2).

Each rank is a process in a network namespace of its own, and they are joined by a bridge through links of limited rate
(a token bucket at each end). `commrt.probing` measures that network; then schedules are priced on what it found, and
run. What is compared is the time of an exchange: prediction, median of the measured ones, their spread.
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
from hosts import Cabling, cluster, missing, output_of_first

import commrt
from commrt.algorithms.catalogue import by_name
from commrt.pricing.simulate import Pricing
from commrt.probing import gathered, probe
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.transport.protocol import Moment

NAMES = ("ring", "torus2d", "gossip")
SIZES = (256 << 10, 1 << 20, 4 << 20)
REPEATS, WARM, IN_A_ROW = 7, 1, 5


@dataclass(frozen=True)
class Row:
    """One exchange."""

    name: str
    nbytes: int
    predicted_ms: float
    measured_ms: float
    low_ms: float
    high_ms: float

    @property
    def off(self) -> float:
        """By how much the prediction is wrong."""
        return self.predicted_ms / self.measured_ms - 1


def work() -> None:
    """One rank; the first prints what it found."""
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
    """Of one exchange among some that follow each other, so that who begins late does not count; the slowest rank's."""
    bound = bind(program(schedule, world.rank), torch.zeros(nbytes // 4), world.transport)

    def once() -> float:
        begin_s = perf_counter()
        for number in range(IN_A_ROW):
            bound.run(Moment(number, "reality"))
        return (perf_counter() - begin_s) / IN_A_ROW

    found = []
    for _ in range(REPEATS + WARM):
        world.agree("go")
        found.append(max(gathered(world, world.lane.submit(once).result())))
    return found[WARM:]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, help="of each link, in Mbit/s each way")
    parser.add_argument("--json", action="store_true")
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
    """A table."""
    link = cluster["between"]
    probed = f"{link['latency_us']:.0f} us, {8 * link['gbytes_per_s'] * 1e3:.0f} Mbit/s"
    print(f"links of {rate_mbit:g} Mbit/s: probed {probed}")
    print("| exchange | KiB | predicted, ms | measured, ms (quartiles) | off |\n|---|---|---|---|---|")
    for row in rows:
        spread = f"{row.measured_ms:.1f} ({row.low_ms:.1f} to {row.high_ms:.1f})"
        print(f"| {row.name} | {row.nbytes >> 10:,} | {row.predicted_ms:.1f} | {spread} | {row.off:+.0%} |")


if __name__ == "__main__":
    main()
