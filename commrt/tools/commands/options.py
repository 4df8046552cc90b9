# SPDX-License-Identifier: Apache-2.0
"""Options that several commands take, as typer reads them and as commands get them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil
from typing import Annotated, NamedTuple

import typer

from commrt.algorithms.direct import Direct
from commrt.algorithms.local import LocalSGD
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.wires import GRADIENT_NBYTES, QUANTIZERS, wire_nbytes
from commrt.tools.planning.workload import Workload

__all__ = [
    "BATCH",
    "CLUSTER",
    "WIRE_HELP",
    "BackupOptions",
    "Batch",
    "BothWays",
    "BucketCapMb",
    "ClusterName",
    "ComputeMs",
    "Delay",
    "ExchangeOptions",
    "Exponent",
    "Fragments",
    "Grid",
    "Json",
    "Law",
    "LawName",
    "LocalOptions",
    "Model",
    "Nbytes",
    "Parameters",
    "Period",
    "RingCount",
    "Seed",
    "ShapeOptions",
    "Steps",
    "TimesFile",
    "TopologyName",
    "Wire",
    "WireDtype",
    "Within",
    "compute_of",
    "leave_out",
    "local_option",
    "workload_of",
]  # fmt: skip

BATCH, CLUSTER = 32, "abci"
MODELS: dict[str, Callable[[], Workload]] = {
    "resnet50": Workload.resnet50,
    "vgg_a": Workload.vgg_a,
    "overfeat_fast": Workload.overfeat_fast,
    "cd_dnn": Workload.cd_dnn,
}
"""What --model takes by name."""
MOST_PARAMETERS = 10**15

Wire = StrEnum("Wire", ["fp32", "bf16", "fp16", "int8", "int4", "int2", "float8"])
LawName = StrEnum("LawName", ["paper", "exponential", "slow"])

option = typer.Option
shape_option = partial(typer.Option, rich_help_panel="Shape of the algorithm")
slow_option = partial(typer.Option, rich_help_panel="Backup workers: how slow ranks are")
local_option = partial(typer.Option, rich_help_panel="Local SGD")

Json = Annotated[bool, option("--json", help="Print one JSON object on standard output, and nothing else there.")]
Seed = Annotated[int, option(min=0, help="Seed of all random numbers.")]
SeedOfTimes = Annotated[int | None, option(min=0, show_default="0", help="Seed of the ranks' random times.")]
ClusterName = Annotated[
    str | None, option(metavar="NAME|FILE", show_default="abci", help="A cluster that commrt ships, or a TOML file.")
]
Nbytes = Annotated[
    float | None,
    option(min=0, help="Bytes that each rank contributes; before they are quantized, if --wire names codes."),
]
Model = Annotated[
    str | None,
    option(
        help="Exchange this model's gradients in a training step: resnet50, vgg_a, overfeat_fast, cd_dnn, "
        "transformer:WIDTHxDEPTHxTOKENS, a number of parameters, or a .json file of "
        "commrt.tools.workload_of(...).save."
    ),
]
Batch = Annotated[
    int | None,
    option(min=1, max=1_000_000_000, show_default="32", help="Images per rank, if the cluster's speed is known."),
]
ComputeMs = Annotated[float | None, option(min=0.001, help="How long a step computes, in milliseconds.")]
WIRE_HELP = "The dtype that gradients travel in, or codes of few bits, which need direct: int8, int4, int2, float8."
WireDtype = Annotated[Wire, option(help=WIRE_HELP)]
BucketCapMb = Annotated[float, option(min=0.001, help="Size of a gradient bucket, in MiB.")]

Grid = Annotated[str | None, shape_option(help="For torus2d: ranks in a row x ranks in a column, such as 4x3.")]
BothWays = Annotated[bool, shape_option("--both-ways", help="For torus2d: half row-first, half column-first.")]
TopologyName = Annotated[str | None, shape_option(help="For gossip: dissemination or hypercube.")]
Within = Annotated[
    int | None,
    shape_option(
        help="For gossip and direct: ranks in a row, such as those of a node. For rings, double_tree: ranks of a node."
    ),
]
RingCount = Annotated[
    int | None,
    shape_option(
        "--rings", min=1, show_default="one per network card", help="For rings: how many, one per network card."
    ),
]

Steps = Annotated[int | None, slow_option(min=1, show_default="10000", help="Number of steps to sample.")]
Law = Annotated[
    LawName | None,
    slow_option(
        show_default="paper",
        help="How long ranks take. paper: a fit to published figures, as recalled. exponential: a constant and an "
        "exponential tail. slow: all equal, but 5 to 20 times as long in 3 % of steps.",
    ),
]
Parameters = Annotated[
    list[str] | None, slow_option("--set", metavar="NAME=NUMBER", help="Set a parameter of the law; repeatable.")
]
TimesFile = Annotated[
    str | None,
    slow_option(
        metavar="FILE",
        help="Use recorded times: a timeline, or JSON or CSV with each rank's seconds per step.",
    ),
]
Exponent = Annotated[
    float | None,
    slow_option(
        show_default="published counts with --law paper, else 1",
        help="Updates to the goal fall as (gradients per update)^-EXPONENT: 1 if twice the batch halves them, 0 if it "
        "does not help.",
    ),
]
MOST_STEPS = 1_000_000
Period = Annotated[
    int | None,
    local_option(min=1, max=MOST_STEPS, show_default="16", help="Steps that ranks train alone before they average."),
]
Delay = Annotated[
    int | None,
    local_option(
        min=0,
        max=MOST_STEPS,
        show_default="0",
        help="Steps after which the average is used, at most the period. They hide the exchange.",
    ),
]
Fragments = Annotated[
    int | None,
    local_option(
        min=1, max=MOST_STEPS, show_default="1", help="Parts of the model that leave one after the other in a period."
    ),
]
LIMITS = {"compute_ms": 1e9, "jitter": 1e9, "bucket_cap_mb": 1e9, "nbytes": 1e18}
JITTER_STEPS, MOST_JITTER_TIMES = 50, 10_000_000
"""Default of --steps with --jitter, and the most ranks x steps that are simulated one by one."""


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """The options of an exchange; None if an option was not given."""

    ranks: int = 4
    cluster: str | None = None
    nbytes: float | None = None
    model: str | None = None
    wire: str = "fp32"
    bucket_cap_mb: float = 25.0
    batch: int | None = None
    compute_ms: float | None = None
    jitter: float | None = None
    steps: int | None = None
    seed: int = 0

    @property
    def wire_nbytes(self) -> float:
        """Return the bytes that --nbytes has on the wire: fewer if they are quantized."""
        quantizer = QUANTIZERS.get(self.wire)
        nbytes = self.nbytes or 0.0
        return nbytes if quantizer is None else wire_nbytes(ceil(nbytes / GRADIENT_NBYTES), quantizer)

    def check(self) -> None:
        """Raise `UsageError` for options that do not fit together."""
        if (self.nbytes is None) == (self.model is None):
            raise UsageError("say what is exchanged: --nbytes for a buffer, or --model for a model's gradients")
        of_a_step = {"--batch": self.batch, "--compute-ms": self.compute_ms, "--jitter": self.jitter}
        if self.model is None and (given := [name for name, value in of_a_step.items() if value is not None]):
            raise UsageError(f"{given[0]} describes a training step: give --model too")
        self.check_numbers()
        if self.batch is not None and self.compute_ms is not None:
            raise UsageError("--batch and --compute-ms both say how long a step computes: leave one out")

    def check_numbers(self) -> None:
        """Raise `UsageError` for numbers that are not finite or too large to compute with."""
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value < most:
                raise UsageError(f"--{name.replace('_', '-')} {value:g}: give a number from 0 to {most:g}")
        steps, most_steps = self.steps or JITTER_STEPS, MOST_JITTER_TIMES // self.ranks
        if steps > most_steps:
            raise UsageError(f"{steps:,} steps of {self.ranks:,} ranks are too many: give up to --steps {most_steps}")


class ShapeOptions(NamedTuple):
    """The shape of an algorithm; None if an option was not given."""

    grid: str | None = None
    both_ways: bool = False
    topology: str | None = None
    within: int | None = None
    rings: int | None = None

    def given(self) -> dict[str, object]:
        """Return the options by name; None for one that was not given."""
        values = self._asdict() | {"both_ways": self.both_ways or None}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


class BackupOptions(NamedTuple):
    """The options about backup workers; None if an option was not given."""

    ranks: int | None
    steps: int | None
    seed: int
    law: str | None
    parameters: Sequence[str]
    """Of the law, each as NAME=NUMBER."""
    times: str | None
    exponent: float | None

    def given(self) -> dict[str, object]:
        """Return the options about times of ranks by name; None for one that was not given."""
        return {
            "--law": self.law,
            "--set": self.parameters or None,
            "--times": self.times,
            "--steps": self.steps,
            "--exponent": self.exponent,
        }

    @property
    def law_name(self) -> str:
        """Return where the times of ranks come from."""
        return "recorded" if self.times is not None else self.law or LawName.paper.value


class LocalOptions(NamedTuple):
    """The options about local SGD; None if an option was not given."""

    period: int | None = None
    delay: int | None = None
    fragments: int | None = None

    def given(self) -> dict[str, object]:
        """Return the options by name."""
        return {f"--{name}": value for name, value in self._asdict().items()}

    def algorithm(self, wire: str = "fp32") -> LocalSGD:
        """Return local SGD with these options; raises `UsageError`. Codes travel by `Direct`."""
        values = self._asdict() | ({"inner": Direct()} if wire in QUANTIZERS else {})
        return LocalSGD(**{name: value for name, value in values.items() if value is not None})


def compute_of(options: ExchangeOptions, workload: Workload, cluster: Cluster) -> tuple[float, float | None]:
    """Return how long a step computes in seconds, and images per second of a rank with that batch if it is known."""
    if options.compute_ms is not None:
        return options.compute_ms / 1e3, None
    if workload.name not in cluster.compute:
        raise UsageError(
            f"how long a step of {workload.name} computes on {cluster.name} is not known: give --compute-ms"
        )
    batch = options.batch or BATCH
    rate = cluster.compute[workload.name] * cluster.efficiency_at(batch)
    return batch / rate, rate


def workload_of(model: str) -> Workload:
    """Return the workload that --model describes; raises `UsageError`."""
    if model in MODELS:
        return MODELS[model]()
    if model.endswith(".json"):
        return Workload.read(model)
    if sizes := re.fullmatch(r"transformer:(\d{1,9})x(\d{1,5})x(\d{1,9})", model):
        return Workload.transformer(*map(int, sizes.groups()))
    try:
        numel = int(float(model))
    except (ValueError, OverflowError):
        numel = 0
    if not 0 < numel <= MOST_PARAMETERS:
        known = (
            f"{', '.join(MODELS)}, transformer:WIDTHxDEPTHxTOKENS, a .json file of commrt.tools.workload_of(...).save"
        )
        raise UsageError(f"--model {model}: give {known}, or a number of parameters, such as 25.6e6")
    return Workload.even(numel, parts=min(numel, 100))


def leave_out(why: str, options: Mapping[str, object]) -> None:
    """Raise `UsageError` for the first option that was given: it would be ignored."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{why}: leave {given[0]} out")
