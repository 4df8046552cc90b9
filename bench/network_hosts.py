# SPDX-License-Identifier: Apache-2.0
"""A cluster on one Linux machine: hosts are network namespaces, joined by a bridge through links of limited rate.

Needs root and iproute2. A token bucket at each end limits a link, each way separately, so the hosts' links are slow and
the switch is not. Everything is removed at the end, also after an error.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cabling", "cluster", "missing", "output_of_first"]

SWITCH, PORT = "commrt-switch", 29_511
NETWORK = "10.213.7"
BURST = "8kb"
CONGESTION_CONTROL = "reno"
"""Every kernel has this one. Without it, results depend on the machine's settings."""


@dataclass(frozen=True)
class Cabling:
    """The hosts and the rates of their links, in Mbit/s each way."""

    hosts: int
    rate_mbit: float = 200.0
    own_rate_mbit: Mapping[int, float] | None = None
    """Rates of hosts with another link."""

    def rate(self, host: int) -> str:
        """Return the rate of a link, as tc writes it."""
        return f"{(self.own_rate_mbit or {}).get(host, self.rate_mbit):g}mbit"


def missing() -> str | None:
    """Return why no cluster is possible here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's: run this on Linux"
    if not (shutil.which("ip") and shutil.which("tc") and shutil.which("sysctl")):
        return "ip, tc or sysctl is missing: install iproute2 and procps"
    if os.geteuid() != 0:
        return "only root may make network namespaces: run this with sudo, or in a container that may"
    return None


def sh(command: str) -> None:
    """Run a command; raise with its output if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip() or done.returncode}")


def space(host: int) -> str:
    """Return the name of a host's namespace."""
    return f"commrt-host{host}"


def address(host: int) -> str:
    """Return the address of a host."""
    return f"{NETWORK}.{host + 1}"


@contextmanager
def cluster(cabling: Cabling) -> Iterator[None]:
    """Make a switch and its hosts, and remove them afterwards, also if this process is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    made: list[str] = []
    try:
        for name in (SWITCH, *map(space, range(cabling.hosts))):
            if Path("/run/netns", name).exists():  # left by a process that was killed
                sh(f"ip netns del {name}")
            sh(f"ip netns add {name}")
            made.append(name)
        sh(f"ip -n {SWITCH} link add name hub type bridge")
        sh(f"ip -n {SWITCH} link set hub up")
        for host in range(cabling.hosts):
            _plug(host, cabling.rate(host))
        yield
    finally:
        for name in made:
            sh(f"ip netns del {name}")


def _plug(host: int, rate: str) -> None:
    """Connect a host to the switch."""
    ours, port = space(host), f"port{host}"
    sh(f"ip -n {SWITCH} link add name {port} type veth peer name eth netns {ours}")
    sh(f"ip -n {SWITCH} link set {port} master hub up")
    sh(f"ip -n {ours} addr add {address(host)}/24 dev eth")
    sh(f"ip -n {ours} link set eth up")
    sh(f"ip -n {ours} link set lo up")
    sh(f"ip netns exec {ours} sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
    for name, device in ((ours, "eth"), (SWITCH, port)):
        sh(f"tc -n {name} qdisc add dev {device} root tbf rate {rate} burst {BURST} latency 200ms")


def output_of_first(arguments: Sequence[str], hosts: int, per_host: int = 1, timeout_s: float = 500.0) -> str:
    """Run a Python program on all hosts with torchrun's variables, and return what rank 0 prints."""
    processes = [_start(arguments, rank, hosts, per_host) for rank in range(hosts * per_host)]
    try:
        said, _ = processes[0].communicate(timeout=timeout_s)
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise RuntimeError(f"ranks {failed} failed: look at their output above")
    return str(said)


def _start(arguments: Sequence[str], rank: int, hosts: int, per_host: int) -> subprocess.Popen[str]:
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_host,
        "WORLD_SIZE": hosts * per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", space(rank // per_host), sys.executable, *arguments],  # noqa: S607  # as a person would
        env=dict(os.environ) | {name: str(value) for name, value in launcher.items()},
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        text=True,
    )
