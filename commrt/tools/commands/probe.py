# SPDX-License-Identifier: Apache-2.0
"""``commrt probe``: measure the links of the world it runs in, for ``commrt simulate`` and ``commrt plan``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from commrt.pricing.cluster import Cluster
from commrt.store.launcher import launched
from commrt.threads.deadline import require_deadlines
from commrt.tools.pictures.files import require_writable, write

__all__ = ["probe"]


def probe(
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write: a cluster description, .toml.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="How long a rank waits for another one, in seconds.")] = 60.0,
) -> None:
    """Measure the links between ranks, for simulate and plan.

    On this machine, or in the job that starts it.
    """
    from commrt.tools.measuring.probing import probed  # noqa: PLC0415  # imports torch

    require_writable("--out", out, "mine.toml", [".toml"])
    require_deadlines(**{"--timeout-s": timeout_s})
    launch, path = launched(), Path(out)
    cluster = probed(launch, workers, timeout_s)
    if launch is None or launch.rank == 0:  # one writes it
        text = replace(cluster, name=path.stem).text()
        write("--out", out, lambda: path.write_text(text, encoding="utf-8"))
        print(_sentence(cluster, out))


def _sentence(cluster: Cluster, out: str) -> str:
    within, between = cluster.within, cluster.between
    links = []
    if cluster.gpus_per_node > 1:
        links.append(f"{within.latency_us:.0f} us and {within.gbytes_per_s:.3g} GB/s inside a host")
    if cluster.nodes != 1:
        rate = f"{between.nics} x {between.gbytes_per_s:.3g} GB/s"
        links.append(f"{between.latency_us:.0f} us and {rate} between hosts")
    return f"{out}: {', '.join(links)}"
