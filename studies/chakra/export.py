# SPDX-License-Identifier: Apache-2.0
"""Write a schedule as traces for other simulators: ``python studies/chakra/export.py ring --nbytes 25e6 --out traces``.

The traces follow the schema of MLCommons Chakra, as JSON: DIR/ALGORITHM.RANK.et.json. Needs no torch.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from chakra_traces import traces  # of this folder

from commrt.algorithms.catalogue import ALGORITHMS
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import CLUSTER, ShapeOptions, below
from commrt.tools.commands.choosing import choose
from commrt.tools.commands.spreading import spread
from commrt.tools.pictures.files import write

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
@spread
def export(
    algorithm: Annotated[
        str,
        typer.Argument(help=f"{', '.join(ALGORITHMS)}, gossip, local or backup."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="The folder to write to: one file per rank.")],
    nbytes: Annotated[
        float, typer.Option(min=1, callback=below(1e18), help="Bytes of fp32 values that each rank contributes.")
    ],
    shape: ShapeOptions,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Number of ranks.")] = 4,
    cluster: opt.ClusterName = CLUSTER,
) -> None:
    """Write a trace of a schedule for each rank. The cluster says how long adding takes, and how ranks fill nodes."""
    described = Cluster.named(cluster)
    described.require_capacity(ranks)
    chosen = choose(algorithm, shape, described)
    found = traces(chosen.schedule(0, ranks), round(nbytes), described)
    folder = made(out)
    files = [folder / f"{algorithm}.{rank}.et.json" for rank in range(ranks)]
    for file, trace in zip(files, found, strict=True):
        write("--out", str(file), partial(file.write_text, trace.text(), encoding="utf-8"))
    last = "" if ranks == 1 else f" to {files[-1].name}"
    print(f"{ranks:,} trace{'s' * (ranks != 1)} of {round(nbytes):,} bytes: {files[0]}{last}")


def made(out: str) -> Path:
    """Make the folder `out`; raise `UsageError` if no files can be written in it."""
    if not out:
        raise UsageError('--out "": the name of the folder is empty: give one, such as --out traces')
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {out}: nothing can be written there: {error}; give another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {out} cannot be written by this user: give another folder")
    return folder


if __name__ == "__main__":
    main(app)
