# SPDX-License-Identifier: Apache-2.0
"""``commrt export``: a schedule as execution traces, for other simulators. Needs no torch."""

from __future__ import annotations

from functools import partial

from commrt.pricing.cluster import Cluster
from commrt.schedule import Algorithm
from commrt.tools.commands.options import CLUSTER, ExchangeOptions
from commrt.tools.pictures.chakra import traces
from commrt.tools.pictures.files import prepare_folder, write

__all__ = ["run"]


def run(name: str, algorithm: Algorithm, options: ExchangeOptions, out: str) -> None:
    """Write a trace of `algorithm` for each rank into the folder `out`; raise `UsageError` for what has none."""
    options.check_numbers()
    nbytes = round(options.nbytes or 0)
    cluster = Cluster.named(options.cluster or CLUSTER)
    cluster.require_room(options.ranks)
    found = traces(algorithm.schedule(0, options.ranks), nbytes, cluster)
    folder = prepare_folder("--out", out, "traces")
    files = [folder / f"{name}.{rank}.et.json" for rank in range(options.ranks)]
    for file, trace in zip(files, found, strict=True):
        write("--out", str(file), partial(file.write_text, trace.text(), encoding="utf-8"))
    last = "" if options.ranks == 1 else f" to {files[-1].name}"
    print(f"{options.ranks:,} trace{'s' * (options.ranks != 1)} of {nbytes:,} bytes: {files[0]}{last}")
