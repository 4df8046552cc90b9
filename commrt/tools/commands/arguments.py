# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: what they take, their help and limits, and groups of them.

Groups are named tuples, which `spreading` opens for typer. Options that do not fit are refused with
`UsageError`; nothing is read, priced or printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from math import ceil
from typing import Annotated, NamedTuple

import typer

from commrt.algorithms.catalogue import ALGORITHMS
from commrt.algorithms.direct import Direct
from commrt.errors import UsageError
from commrt.local_sgd.policy import LocalSGD
from commrt.quantizer import QUANTIZERS, WIRE_NAMES
from commrt.tools.planning.wires import GRADIENT_NBYTES, wire_nbytes
from commrt.tools.planning.workload import MODELS, TRANSFORMERS

CLUSTER = "abci"
_SHAPES = f"transformer:WIDTHxDEPTHxTOKENS, {', '.join(TRANSFORMERS)}"
FORMS = f"{', '.join(MODELS)}, {_SHAPES}, a .json file of commrt.tools.workload_of(...).save"
"""What --model takes, besides a number of parameters."""

Wire = StrEnum("Wire", WIRE_NAMES)  # type: ignore[misc]  # it wants a literal list
FP32 = Wire("fp32")
LawName = StrEnum("LawName", ["paper", "exponential", "slow"])


def below(most: float) -> Callable[[typer.CallbackParam, float | None], float | None]:
    """Return what refuses numbers that are not finite or too large to compute with."""

    def checked(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not 0 <= value < most:
            raise UsageError(f"{param.opts[0]} {value:g}: give a number from 0 to {most:g}")
        return value

    return checked


option = typer.Option
shape_option = partial(typer.Option, rich_help_panel="Shape of the algorithm")
slow_option = partial(typer.Option, rich_help_panel="Backup workers: how slow ranks are")
local_option = partial(typer.Option, rich_help_panel="Local SGD")

Json = Annotated[
    bool, option("--json", help="Print one JSON object on standard output, and nothing else there.")
]
Seed = Annotated[int, option(min=0, help="Seed of all random numbers.")]
AlgorithmName = Annotated[str, typer.Argument(help=f"{', '.join(ALGORITHMS)} or gossip.")]
Out = Annotated[str, option(metavar="FILE", help="The picture: .svg, .png or .pdf.")]
Ranks = Annotated[int, option(min=1, max=65536, help="Number of ranks.")]
ClusterName = Annotated[
    str, option(metavar="NAME|FILE", help="A cluster that commrt ships, or a TOML file.")
]
Nbytes = Annotated[
    float,
    option(
        min=0,
        callback=below(1e18),
        help="Bytes that each rank contributes, before they are quantized.",
    ),
]
Model = Annotated[str, option(help=f"The model that trains: {FORMS}, or a number of parameters.")]
Batch = Annotated[
    int | None,
    option(
        min=1,
        max=1_000_000_000,
        show_default="32",
        help="Images per rank, if the cluster's speed is known.",
    ),
]
ComputeMs = Annotated[
    float | None,
    option(min=0.001, callback=below(1e9), help="How long a step computes, in milliseconds."),
]
WIRE_HELP = (
    "The dtype that gradients travel in, or codes of few bits, which need direct: int8, int4, int2,"
    " float8."
)
WireDtype = Annotated[Wire, option(case_sensitive=False, help=WIRE_HELP)]
BucketCapMb = Annotated[
    float, option(min=0.001, callback=below(1e9), help="Size of a gradient bucket, in MiB.")
]

MOST_STEPS = 1_000_000
Period = Annotated[
    int | None,
    local_option(
        min=1,
        max=MOST_STEPS,
        show_default="16",
        help="Steps that ranks train alone before they average.",
    ),
]
Delay = Annotated[
    int | None,
    local_option(
        min=0,
        max=MOST_STEPS,
        show_default="0",
        help="Steps, up to the period, until the average is used.",
    ),
]
Fragments = Annotated[
    int | None,
    local_option(
        min=1,
        max=MOST_STEPS,
        show_default="1",
        help="Parts of the model that leave in turn in a period.",
    ),
]


class ExchangeOptions(NamedTuple):
    """An exchange of a buffer."""

    nbytes: Nbytes
    ranks: Ranks = 4
    cluster: ClusterName = CLUSTER
    wire: WireDtype = FP32

    @property
    def nbytes_on_wire(self) -> float:
        """Return the bytes that travel: fewer if they are quantized."""
        quantizer = QUANTIZERS.get(self.wire)
        return (
            self.nbytes
            if quantizer is None
            else wire_nbytes(ceil(self.nbytes / GRADIENT_NBYTES), quantizer)
        )


class StepOptions(NamedTuple):
    """A training step."""

    model: Model
    ranks: Ranks = 4
    cluster: ClusterName = CLUSTER
    wire: WireDtype = FP32
    bucket_cap_mb: BucketCapMb = 25.0
    batch: Batch = None
    compute_ms: ComputeMs = None


class PlanOptions(NamedTuple):
    """A training step whose algorithm and buckets are to be found, its wire if none is given."""

    model: Model
    cluster: ClusterName = CLUSTER
    wire: Annotated[
        Wire | None,
        option(case_sensitive=False, show_default="fp32 and bf16", help=WIRE_HELP),
    ] = None
    batch: Batch = None
    compute_ms: ComputeMs = None


class JitterOptions(NamedTuple):
    """How much the computing of ranks varies."""

    jitter: Annotated[
        float | None,
        option(
            min=0, callback=below(1e9), help="How much computing varies: standard deviation / mean."
        ),
    ] = None
    steps: Annotated[int, option(min=1, help="With --jitter: number of steps to sample.")] = 50
    seed: Seed = 0


class ShapeOptions(NamedTuple):
    """The shape of an algorithm; None if an option was not given."""

    grid: Annotated[
        str | None, shape_option(help="For torus2d: ranks in a row x in a column, such as 4x3.")
    ] = None
    both_ways: Annotated[
        bool, shape_option("--both-ways", help="For torus2d: send half of it column-first.")
    ] = False
    topology: Annotated[
        str | None, shape_option(help="For gossip: dissemination or hypercube.")
    ] = None
    within: Annotated[
        int | None, shape_option(help="For gossip, direct, rings, double_tree: ranks of a node.")
    ] = None
    rings: Annotated[
        int | None,
        shape_option(min=1, show_default="one per network card", help="For rings: how many."),
    ] = None

    def given(self) -> dict[str, object]:
        """Return the options by name; None for one that was not given."""
        values = self._asdict() | {"both_ways": self.both_ways or None}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


class CollectiveOptions(NamedTuple):
    """What a collective is proven with; None if an option was not given."""

    schedule: Annotated[
        str | None, option(show_default="all", help="For a collective: which to prove.")
    ] = None
    root: Annotated[
        int | None, option(min=0, show_default="0", help="For broadcast, reduce, gather, scatter.")
    ] = None


class BackupOptions(NamedTuple):
    """How slow ranks are, and what training loses with some of them; None if not given."""

    ranks: Annotated[
        int | None, option(min=1, max=65536, show_default="100", help="Number of ranks.")
    ] = None
    steps: Annotated[
        int | None, slow_option(min=1, show_default="10000", help="Number of steps to sample.")
    ] = None
    seed: Seed = 0
    law: Annotated[
        LawName | None,
        slow_option(
            show_default="paper",
            help=(
                "How long ranks take. paper: a fit to published figures, as recalled. exponential:"
                " a constant and an exponential tail. slow: all equal, but 5 to 20 times as long in"
                " 3 % of steps."
            ),
        ),
    ] = None
    parameters: Annotated[
        list[str] | None,
        slow_option("--set", metavar="NAME=NUMBER", help="Set a parameter of the law; repeatable."),
    ] = None
    times: Annotated[
        str | None,
        slow_option(
            metavar="FILE",
            help=(
                "Use recorded times: a timeline, or JSON or CSV with each rank's seconds per step."
            ),
        ),
    ] = None
    exponent: Annotated[
        float | None,
        slow_option(
            show_default="published counts with --law paper, else 1",
            help=(
                "Updates to the goal fall as (gradients per update)^-EXPONENT: 1 if twice the batch"
                " halves them, 0 if it does not help."
            ),
        ),
    ] = None

    @property
    def law_name(self) -> str:
        """Return where the times of ranks come from."""
        return "recorded" if self.times is not None else self.law or LawName.paper.value


class LocalOptions(NamedTuple):
    """Local SGD; None if an option was not given."""

    period: Period = None
    delay: Delay = None
    fragments: Fragments = None

    def algorithm(self, wire: str = "fp32") -> LocalSGD:
        """Return local SGD with these options; raises `UsageError`. Codes travel by `Direct`."""
        values = self._asdict() | ({"inner": Direct()} if wire in QUANTIZERS else {})
        return LocalSGD(**{name: value for name, value in values.items() if value is not None})


def leave_out(why: str, options: Mapping[str, object]) -> None:
    """Raise `UsageError` for the first option that was given: it would be ignored."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{why}: leave {given[0]} out")
