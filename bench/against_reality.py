# SPDX-License-Identifier: Apache-2.0
"""The simulator against reality: ``sudo python bench/against_reality.py`` (Linux, iproute2).

Each rank is a process in a network namespace of its own, and they are joined by a bridge through links of limited rate
(a token bucket at each end). `commrt.probing` measures that network; then schedules are priced on what it found, and
run. What is compared is the time of an exchange: prediction, median of the measured ones, their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter

import torch

import commrt
from commrt.algorithms.catalogue import by_name
from commrt.executor import bind
from commrt.probing import gathered, probe
from commrt.program import program
from commrt.simulate import Pricing
from commrt.transport.protocol import Moment

NAMES = ("ring", "torus2d", "gossip")
SIZES = (256 << 10, 1 << 20, 4 << 20)
REPEATS, WARM, IN_A_ROW = 7, 1, 5
SWITCH, PORT = "commrt-switch", 29_511
NETWORK = "10.213.7"


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


def space(rank: int) -> str:
    """The namespace of a rank."""
    return f"commrt-rank{rank}"


def sh(*command: str) -> None:
    """Run it, or raise with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def network(ranks: int, rate: str) -> Iterator[None]:
    """A switch with `ranks` hosts at links of `rate` each way; gone afterwards."""
    made: list[str] = []
    try:
        for name in (SWITCH, *map(space, range(ranks))):
            sh("ip", "netns", "add", name)
            made.append(name)
        sh("ip", "-n", SWITCH, "link", "add", "name", "hub", "type", "bridge")
        sh("ip", "-n", SWITCH, "link", "set", "hub", "up")
        for rank in range(ranks):
            plug(rank, rate)
        yield
    finally:
        for name in made:
            sh("ip", "netns", "del", name)


def plug(rank: int, rate: str) -> None:
    """Join a host to the switch."""
    ours, port = space(rank), f"port{rank}"
    sh("ip", "-n", SWITCH, "link", "add", "name", port, "type", "veth", "peer", "name", "eth", "netns", ours)
    sh("ip", "-n", SWITCH, "link", "set", port, "master", "hub", "up")
    sh("ip", "-n", ours, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", "eth")
    sh("ip", "-n", ours, "link", "set", "eth", "up")
    sh("ip", "-n", ours, "link", "set", "lo", "up")
    for name, device in ((ours, "eth"), (SWITCH, port)):
        sh(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "32kb",
            "latency",
            "200ms",
        )


def work() -> None:
    """One rank; the first prints what it found."""
    torch.set_num_threads(1)
    with commrt.init(120.0) as world:
        cluster = probe(world)
        rows = []
        for name in NAMES:
            schedule = by_name(name).schedule(0, world.size)
            pricing = Pricing(schedule, cluster)
            for nbytes in SIZES:
                times_s = measured_s(world, schedule, nbytes)
                low_s, _, high_s = quantiles(times_s, n=4)
                figures = (pricing.price(nbytes).seconds, median(times_s), low_s, high_s)
                rows.append(Row(name, nbytes, *(1e3 * each for each in figures)))
        if world.rank == 0:
            print(json.dumps({"cluster": asdict(cluster), "rows": [asdict(row) for row in rows]}), flush=True)


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
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    with network(options.ranks, options.rate):
        said = json.loads(run_ranks(options.ranks))
    if options.json:
        print(json.dumps(said))
        return
    show(said["cluster"], [Row(**row) for row in said["rows"]], options.rate)


def run_ranks(ranks: int) -> str:
    """What the first of them prints."""
    crew = [start(rank, ranks) for rank in range(ranks)]
    try:
        said, _ = crew[0].communicate(timeout=500)
        for process in crew:
            process.wait(timeout=60)
    finally:
        for process in crew:
            process.kill()
    if any(process.returncode for process in crew):
        raise RuntimeError("a rank failed: look at its output")
    return str(said)


def start(rank: int, ranks: int) -> subprocess.Popen[str]:
    """A process in its namespace."""
    launcher = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": PORT}
    return subprocess.Popen(
        ["ip", "netns", "exec", space(rank), sys.executable, __file__, "--work"],  # noqa: S607  # as a person would
        env=dict(os.environ) | {name: str(value) for name, value in launcher.items()} | {"GLOO_SOCKET_IFNAME": "eth"},
        stdout=subprocess.PIPE,
        text=True,
    )


def show(cluster: dict[str, dict[str, float]], rows: Sequence[Row], rate: str) -> None:
    """A table."""
    link = cluster["between"]
    print(f"links of {rate}: probed {link['latency_us']:.0f} us, {8 * link['gbytes_per_s'] * 1e3:.0f} Mbit/s")
    print("| exchange | KiB | predicted, ms | measured, ms (quartiles) | off |\n|---|---|---|---|---|")
    for row in rows:
        spread = f"{row.measured_ms:.1f} ({row.low_ms:.1f} to {row.high_ms:.1f})"
        print(f"| {row.name} | {row.nbytes >> 10:,} | {row.predicted_ms:.1f} | {spread} | {row.off:+.0%} |")


if __name__ == "__main__":
    main()
