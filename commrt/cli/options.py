# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands take, and what may be said there."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = [
    "BatchOption",
    "BothWays",
    "BucketOption",
    "ClusterOption",
    "ComputeOption",
    "Exponent",
    "GridOption",
    "Interpolation",
    "InterpolationOption",
    "Json",
    "LawName",
    "LawOption",
    "ModelOption",
    "NbytesOption",
    "Parameters",
    "Ranks",
    "RecipeName",
    "Seed",
    "Steps",
    "TimesFile",
    "TopologyOption",
    "Wire",
    "WireOption",
    "WithinOption",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


class Wire(StrEnum):
    """What travels."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class RecipeName(StrEnum):
    """How ``train`` trains."""

    plain = "plain"
    large_batch = "large-batch"


class LawName(StrEnum):
    """How long ranks take."""

    paper = "paper"
    exponential = "exponential"
    slow = "slow"


class Interpolation(StrEnum):
    """What lies between two published counts."""

    linear = "linear"
    power = "power"


Ranks = Annotated[int | None, typer.Option(min=1, max=4096, show_default="100", help="How many ranks there are.")]
Steps = Annotated[int | None, typer.Option(min=1, show_default="10000", help="How many steps to sample.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is drawn at random.")]
LawOption = Annotated[
    LawName | None,
    typer.Option(
        show_default="paper",
        help="How long ranks take: a fit to published figures, as recalled; a constant and an exponential tail; or the "
        "same for all, but 5 to 20 times as long in 3 % of steps.",
    ),
]
Parameters = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="A parameter of the law; may be repeated.")
]
TimesFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A run's own times instead of a law: of train --trace; or JSON or CSV, each rank's seconds per step.",
    ),
]
Exponent = Annotated[
    float | None,
    typer.Option(
        show_default="published counts with --law paper, else 1",
        help="Updates to the goal fall as (gradients per update)^-EXPONENT: 1 if twice the batch halves them, 0 if it "
        "does not help.",
    ),
]
InterpolationOption = Annotated[
    Interpolation | None, typer.Option(show_default="linear", help="Between the published counts of updates.")
]


ClusterOption = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", show_default="abci", help="One that is shipped, or a TOML file.")
]
NbytesOption = Annotated[float | None, typer.Option(min=0, help="Bytes that each rank contributes.")]
ModelOption = Annotated[
    str | None, typer.Option(help="Whose gradients: resnet50, or a number of parameters. Estimates a step too.")
]
BatchOption = Annotated[
    int | None, typer.Option(min=1, show_default="32", help="Images per rank, where the cluster's speed is known.")
]
ComputeOption = Annotated[float | None, typer.Option(min=0.001, help="How long a step computes.")]
WireOption = Annotated[Wire, typer.Option(help="What gradients travel as.")]
BucketOption = Annotated[float, typer.Option(min=0.001, help="MiB of a bucket.")]
GridOption = Annotated[str | None, typer.Option(help="For torus2d: ranks in a row x ranks in a column, as 4x3.")]
BothWays = Annotated[bool, typer.Option("--both-ways", help="For torus2d: half row-first, half column-first.")]
TopologyOption = Annotated[str | None, typer.Option(help="For gossip: dissemination or hypercube.")]
WithinOption = Annotated[int | None, typer.Option(help="For gossip: ranks of a row, such as those of a node.")]
