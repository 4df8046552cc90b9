# SPDX-License-Identifier: Apache-2.0
"""``commrt probe``: the links of the world it runs in, as a file for ``commrt simulate`` and ``commrt plan``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commrt.cli.outputs import require_writable, write
from commrt.cli.workers import run_workers
from commrt.errors import UsageError
from commrt.membership.launcher import launched, require_deadlines
from commrt.pricing.cluster import Cluster
from commrt.probing import probe
from commrt.runtime.opening import init

__all__ = ["run"]


def run(out: str, workers: int, timeout_s: float) -> None:
    """Measure, and write the file; under a launcher the first rank does that."""
    path = Path(out)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise UsageError(f"--out {out}: give a .toml file in a folder that exists")
    require_writable("--out", out, "mine.toml")
    require_deadlines(**{"--timeout-s": timeout_s})
    launch = launched()
    if launch is None or launch.size == 1:
        cluster = run_workers(workers, lambda: _measured(timeout_s))[0]
    else:
        cluster = _measured(timeout_s)
    if launch is None or launch.rank == 0:
        text = replace(cluster, name=path.stem).text()
        write("--out", out, lambda: path.write_text(text, encoding="utf-8"))
        print(_sentence(cluster, out))


def _measured(timeout_s: float) -> Cluster:
    with init(timeout_s) as world:
        return probe(world)


def _sentence(cluster: Cluster, out: str) -> str:
    within, between = cluster.within, cluster.between
    near = f"{within.latency_us:.0f} us and {within.gbytes_per_s:.3g} GB/s"
    far = f"{between.latency_us:.0f} us and {between.nics} x {between.gbytes_per_s:.3g} GB/s"
    where = f"{near} inside of a host" if cluster.gpus_per_node > 1 else ""
    away = "" if cluster.nodes == 1 else f"{', ' if where else ''}{far} from host to host"
    return f"{out}: {where}{away}"
