# SPDX-License-Identifier: Apache-2.0
"""Write a schedule as traces for other simulators: ``python studies/chakra/export.py ring --nbytes 25e6 --out traces``.

The traces follow the schema of MLCommons Chakra, as JSON: DIR/ALGORITHM.RANK.et.json. Needs no torch.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from chakra_traces import traces  # of this folder

from commrt.pricing.cluster import Cluster
from commrt.tools.commands import options as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.options import CLUSTER, ExchangeOptions, ShapeOptions
from commrt.tools.commands.verify import choose
from commrt.tools.pictures.files import prepare_folder, write

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def export(
    algorithm: Annotated[
        str,
        typer.Argument(help="ring, rings, halving_doubling, double_tree, torus2d, direct, gossip, local or backup."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder to write to: one file per rank.")],
    nbytes: Annotated[float, typer.Option(min=1, help="Bytes of fp32 values that each rank contributes.")],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Number of ranks.")] = 4,
    cluster: opt.ClusterName = None,
    grid: opt.Grid = None,
    both_ways: opt.BothWays = False,
    topology: opt.TopologyName = None,
    within: opt.Within = None,
    rings: opt.RingCount = None,
) -> None:
    """Write a trace of a schedule for each rank. The cluster says how long adding takes, and how ranks fill nodes."""
    ExchangeOptions(ranks, cluster, nbytes).check_numbers()
    described = Cluster.named(cluster or CLUSTER)
    described.require_capacity(ranks)
    chosen = choose(algorithm, ShapeOptions(grid, both_ways, topology, within, rings), described)
    found = traces(chosen.schedule(0, ranks), round(nbytes), described)
    folder = prepare_folder("--out", out, "traces")
    files = [folder / f"{algorithm}.{rank}.et.json" for rank in range(ranks)]
    for file, trace in zip(files, found, strict=True):
        write("--out", str(file), partial(file.write_text, trace.text(), encoding="utf-8"))
    last = "" if ranks == 1 else f" to {files[-1].name}"
    print(f"{ranks:,} trace{'s' * (ranks != 1)} of {round(nbytes):,} bytes: {files[0]}{last}")


if __name__ == "__main__":
    main(app)
