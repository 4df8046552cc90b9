# SPDX-License-Identifier: Apache-2.0
"""The command ``commrt``: what each subcommand takes. What it does is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from commrt.cli.options import (
    BatchOption,
    BothWays,
    BucketOption,
    ClusterOption,
    ComputeOption,
    Exponent,
    GridOption,
    InterpolationOption,
    Json,
    LawOption,
    ModelOption,
    NbytesOption,
    Parameters,
    RecipeName,
    Seed,
    Steps,
    TimesFile,
    TopologyOption,
    Wire,
    WireOption,
    WithinOption,
)
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError

__all__ = ["app", "in_one_line", "main"]

app = typer.Typer(
    help="Collectives as schedules that are proven, then run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

LONGEST_LINE = 1500
"""Of an error, in characters."""


@app.command()
def verify(
    algorithm: Annotated[str, typer.Argument(help="ring, halving_doubling, torus2d, gossip or backup.")],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="How many ranks take part.")] = 4,
    grid: GridOption = None,
    both_ways: BothWays = False,
    topology: TopologyOption = None,
    within: WithinOption = None,
    backups: Annotated[
        int | None, typer.Option(min=0, help="For backup: how many of the ranks need not be waited for.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the schedule, step by step.")] = False,
    as_json: Json = False,
) -> None:
    """Prove a schedule, and say what it costs."""
    from commrt.cli import verify as command  # noqa: PLC0415  # commands are imported when called

    chosen = command.choose(algorithm, grid, both_ways, topology, within, backups)
    if not command.run(chosen, ranks, show, as_json):
        raise typer.Exit(1)


@app.command()
def train(
    workers: Annotated[
        int, typer.Option(help="Local worker processes; ignored under torchrun, mpirun, or srun of several tasks.")
    ] = 4,
    algorithm: Annotated[
        str, typer.Option(help="ring, halving_doubling, torus2d, gossip, backup, or ddp for plain DDP.")
    ] = "torus2d",
    backups: Annotated[
        int | None,
        typer.Option(min=0, show_default="1", help="For backup: how many of the workers need not be waited for."),
    ] = None,
    compare: Annotated[list[str] | None, typer.Option(help="Train again with this one; may be repeated.")] = None,
    epochs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Passes over the 4,000 training images.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step over all workers together.")] = 64,
    lr: Annotated[
        float | None, typer.Option(min=0.0, show_default="0.05; large-batch: 1", help="The highest learning rate.")
    ] = None,
    recipe: Annotated[
        RecipeName,
        typer.Option(
            help="plain: SGD with momentum 0.9, a rate that falls along a cosine. large-batch: LARS, a rate that rises "
            "for an epoch, smoothed labels, and batches four times as large after a third of the epochs."
        ),
    ] = RecipeName.plain,
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the order of images.")] = 0,
    wire: Annotated[Wire, typer.Option(help="The dtype that travels.")] = Wire.fp32,
    bucket_cap_mb: Annotated[float, typer.Option(help="Size of a gradient bucket.")] = 25.0,
    timeout_s: Annotated[
        float,
        typer.Option(
            envvar="COMMRT_TIMEOUT_S", help="Deadline of every wait for another worker once all have come, in seconds."
        ),
    ] = 60.0,
    start_timeout_s: Annotated[float, typer.Option(help="Deadline for all workers to come, in seconds.")] = 120.0,
    trace: Annotated[
        str | None, typer.Option(help="Write what each worker did when to this file, for ui.perfetto.dev.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a page about the run and those it is compared with, DIR/report.html."),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Let something go wrong in each run; may be repeated. slow:rank=2,prob=0.1,seconds=0.5: rank 2 (each "
            "rank, if none is named) computes that much longer in a tenth of its steps. slow:prob=0.03,low=5,high=20: "
            "5 to 20 times as long. kill:rank=3,step=20: SIGKILL when it begins that step, counted from 0; "
            "with back=2 another process takes its place 2 s later. "
            "stop:rank=1,step=30,seconds=5: SIGSTOP, and it goes on after so many seconds.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small CNN on 4,000 real MNIST images with several workers, and test it with 1,000 others."""
    from commrt.cli import train as command  # noqa: PLC0415  # commands are imported when called
    from commrt.cli.inject import parse  # noqa: PLC0415
    from commrt.cli.job import Job  # noqa: PLC0415
    from commrt.cli.recipes import RECIPES  # noqa: PLC0415

    if "backup" not in {algorithm, *(compare or [])}:
        _leave_out(f"{algorithm} has no backup workers", {"--backups": backups})
    lr = RECIPES[recipe.value].lr if lr is None else lr
    faults = tuple(parse(fault) for fault in inject or ())
    job = Job(
        algorithm, epochs, batch_size, lr, seed, wire.value, bucket_cap_mb, timeout_s, start_timeout_s, trace, faults,
        1 if backups is None else backups, recipe.value, report,
    )  # fmt: skip
    command.run(job, compare or [], workers, as_json)


@app.command()
def simulate(
    algorithm: Annotated[
        str,
        typer.Argument(help="ring, halving_doubling, torus2d, gossip; or backup: steps that wait for some ranks."),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, show_default="4; backup: 100", help="How many ranks there are.")
    ] = None,
    cluster: ClusterOption = None,
    nbytes: NbytesOption = None,
    model: ModelOption = None,
    wire: WireOption = Wire.fp32,
    bucket_cap_mb: BucketOption = 25.0,
    batch: BatchOption = None,
    compute_ms: ComputeOption = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, help="By how much that varies: standard deviation / mean.")
    ] = None,
    grid: GridOption = None,
    both_ways: BothWays = False,
    topology: TopologyOption = None,
    within: WithinOption = None,
    steps: Annotated[
        int | None, typer.Option(min=1, show_default="50; backup: 10000", help="How many steps to sample.")
    ] = None,
    seed: Seed = 0,
    law: LawOption = None,
    parameters: Parameters = None,
    times: TimesFile = None,
    exponent: Exponent = None,
    interpolation: InterpolationOption = None,
    as_json: Json = False,
) -> None:
    """Say what a way of training would cost on many ranks, without them.

    For backup the options from --law on say how long ranks take; for the others --cluster to --within what they run on.
    """
    if algorithm == "backup":
        exchange = {"--nbytes": nbytes, "--model": model, "--cluster": cluster, "--batch": batch, "--jitter": jitter}
        _leave_out("backup is simulated without exchanges", exchange | {"--compute-ms": compute_ms, "--grid": grid})
        from commrt.cli import simulate as of_backups  # noqa: PLC0415  # commands are imported when called
        from commrt.cli.backups import Question  # noqa: PLC0415

        of_backups.run(Question(ranks, steps, seed, law, parameters or [], times, exponent, interpolation), as_json)
        return
    times_of_ranks = {"--law": law, "--set": parameters, "--times": times, "--exponent": exponent}
    _leave_out("an exchange is simulated with --jitter", times_of_ranks | {"--interpolation": interpolation})
    from commrt.cli import pricing  # noqa: PLC0415
    from commrt.cli.verify import choose  # noqa: PLC0415

    case = pricing.Case(
        ranks or 4, cluster, nbytes, model, wire.value, bucket_cap_mb, batch, compute_ms, jitter, steps, seed
    )
    pricing.run(choose(algorithm, grid, both_ways, topology, within), case, as_json)


@app.command()
def plan(
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, show_default="4; --backups: 100", help="How many ranks there are.")
    ] = None,
    cluster: ClusterOption = None,
    nbytes: NbytesOption = None,
    model: ModelOption = None,
    wire: Annotated[Wire | None, typer.Option(show_default="fp32 and bf16", help="What gradients travel as.")] = None,
    batch: BatchOption = None,
    compute_ms: ComputeOption = None,
    backups: Annotated[
        str | None, typer.Option(help="auto, or how many of the ranks a step need not wait for, to be compared.")
    ] = None,
    steps: Steps = None,
    seed: Seed = 0,
    law: LawOption = None,
    parameters: Parameters = None,
    times: TimesFile = None,
    exponent: Exponent = None,
    interpolation: InterpolationOption = None,
    as_json: Json = False,
) -> None:
    """Say what to choose for a job, and why.

    With --nbytes or --model: algorithm, grid, wire and buckets, on a cluster. With --backups: how many backups, for
    ranks of which some are slow; the options after it say how slow. With --model and --backups: all of that at once.
    """
    from commrt.cli import plan as of_backups  # noqa: PLC0415  # commands are imported when called
    from commrt.cli import plans  # noqa: PLC0415
    from commrt.cli.backups import Question  # noqa: PLC0415
    from commrt.cli.pricing import Case  # noqa: PLC0415

    question = Question(ranks, steps, seed, law, parameters or [], times, exponent, interpolation)
    if backups is not None and model is None:
        exchange = {"--nbytes": nbytes, "--cluster": cluster, "--wire": wire, "--batch": batch}
        _leave_out("--backups is planned for itself, or with --model", exchange | {"--compute-ms": compute_ms})
        of_backups.run(backups, question, as_json)
        return
    if backups is None:
        times_of_ranks = {"--law": law, "--set": parameters, "--times": times, "--steps": steps, "--exponent": exponent}
        _leave_out("without --backups nobody is slow", times_of_ranks | {"--interpolation": interpolation})
    known, waitings = (ranks or 4, []) if backups is None else of_backups.waitings(backups, question)
    case = Case(known, cluster, nbytes, model, batch=batch, compute_ms=compute_ms)
    plans.run(case, ["fp32", "bf16"] if wire is None else [wire.value], as_json, waitings)


@app.command()
def probe(
    out: Annotated[str, typer.Option(metavar="FILE", help="The cluster's description: a .toml file.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="Deadline of every wait, in seconds.")] = 60.0,
) -> None:
    """Measure the links between ranks, here or in the job that this is started in, for simulate and plan."""
    from commrt.cli import probe as command  # noqa: PLC0415  # commands are imported when called

    command.run(out, workers, timeout_s)


@app.command()
def draw(
    what: Annotated[
        str,
        typer.Argument(
            help="An algorithm; or scaling: how all of them do with more ranks; or a file of train --trace, such as "
            "trace.json: what happened."
        ),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The picture: .svg, .png or .pdf.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65536,
            show_default="4; scaling: up to 4096",
            help="How many ranks there are; of a schedule without --model at most 64.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    model: ModelOption = None,
    wire: WireOption = Wire.fp32,
    bucket_cap_mb: BucketOption = 25.0,
    batch: BatchOption = None,
    compute_ms: ComputeOption = None,
    grid: GridOption = None,
    both_ways: BothWays = False,
    topology: TopologyOption = None,
    within: WithinOption = None,
    step: Annotated[
        int | None, typer.Option(min=0, show_default="a typical one", help="Of a recorded run: which to draw.")
    ] = None,
) -> None:
    """Draw a schedule; with --model a training step with it; or how all algorithms scale; or a step of a real run."""
    if what.endswith(".json"):
        of_a_plan = {"--ranks": ranks, "--cluster": cluster, "--model": model, "--batch": batch, "--grid": grid}
        _leave_out("a recorded run is drawn as it was", of_a_plan | {"--compute-ms": compute_ms})
        from commrt.cli import draw_run  # noqa: PLC0415  # commands are imported when called

        draw_run.run(what, step, out)
        return
    _leave_out("only a recorded run has steps", {"--step": step})
    from commrt.cli import draw as command  # noqa: PLC0415  # commands are imported when called
    from commrt.cli.pricing import Case  # noqa: PLC0415
    from commrt.cli.verify import choose  # noqa: PLC0415

    all_of_them = what == command.SCALING
    most = ranks or (4096 if all_of_them else 4)
    case = Case(most, cluster, None, model, wire.value, bucket_cap_mb, batch, compute_ms)
    command.run(None if all_of_them else choose(what, grid, both_ways, topology, within), case, out)


def _leave_out(why: str, options: Mapping[str, object]) -> None:
    """Raise for the first that was given, and would be ignored."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{why}: leave {given[0]} out")


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Start no processes to exchange something.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is installed, what would break or hurt, and what to do about it; ends with 1 if something would break.

    Two processes exchange something here, for 4 seconds at most.
    """
    from commrt.cli import doctor as command  # noqa: PLC0415  # commands are imported when called

    if not command.run(as_json, quick):
        raise typer.Exit(1)


def main() -> None:
    """Run the command. An error raised on purpose is one sentence.

    Exit codes: 2 for bad input, 1 for bad luck, 130 for Ctrl-C.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
    try:
        app()
    except CommrtError as error:
        print(f"commrt: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ScheduleError | DisagreementError) else 1)


def in_one_line(error: CommrtError) -> str:
    """What it says, where what was typed may hold anything, of any length: nothing in there moves the cursor."""
    said = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(error))
    return said if len(said) <= LONGEST_LINE else f"{said[: LONGEST_LINE // 2]} ... {said[-LONGEST_LINE // 2 :]}"
