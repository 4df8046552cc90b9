# SPDX-License-Identifier: Apache-2.0
"""The command ``commrt``: the options of each subcommand. Its code is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

import commrt
from commrt.cli import options as opt
from commrt.cli.options import BackupOptions, ExchangeOptions, LocalOptions, RecipeName, Wire
from commrt.cost.planner import BackupCost
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError

__all__ = ["app", "in_one_line", "main"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

TRAIN, PRICE, MACHINE = "Train", "Prove, price and draw", "Look at a machine"
MAX_CHARACTERS = 1500
"""Of an error message."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"commrt {commrt.__version__}")
        raise typer.Exit


@app.callback()
def commrt_(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Data-parallel training with collectives that are proven before they run.

    Exit codes: 0 success, 1 runtime failure, 2 invalid input, 130 interrupted.
    """


@app.command(rich_help_panel=TRAIN)
def train(
    workers: Annotated[
        int, typer.Option(help="Local worker processes; ignored under torchrun, mpirun, or srun of several tasks.")
    ] = 4,
    algorithm: Annotated[
        str | None,
        typer.Option(
            show_default="torus2d; direct for a wire of codes",
            help="ring, halving_doubling, torus2d, direct, gossip, local, backup, or ddp for plain DDP.",
        ),
    ] = None,
    backups: Annotated[
        int | None,
        typer.Option(min=0, show_default="1", help="For backup: how many workers a step does not wait for."),
    ] = None,
    compare: Annotated[list[str] | None, typer.Option(help="Train again with this algorithm; repeatable.")] = None,
    epochs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Passes over the 4,000 training images.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step, over all workers together.")] = 64,
    lr: Annotated[
        float | None, typer.Option(min=0.0, show_default="0.05; large-batch: 1", help="The highest learning rate.")
    ] = None,
    recipe: Annotated[
        RecipeName,
        typer.Option(
            help="plain: SGD with momentum 0.9 and a cosine learning rate. large-batch: LARS, a warm-up of one epoch, "
            "label smoothing, and batches four times as large after a third of the epochs."
        ),
    ] = RecipeName.plain,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32, help="Seed of the initial weights and of the order of images.")
    ] = 0,
    wire: opt.WireDtype = Wire.fp32,
    bucket_cap_mb: opt.BucketCapMb = 25.0,
    timeout_s: Annotated[
        float, typer.Option(envvar="COMMRT_TIMEOUT_S", help="How long a worker waits for another one, in seconds.")
    ] = 60.0,
    start_timeout_s: Annotated[
        float, typer.Option(help="How long to wait for all workers to start, in seconds.")
    ] = 120.0,
    trace: Annotated[
        str | None, typer.Option(help="Write a timeline of all workers to this file, for ui.perfetto.dev.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a page about the run and those it is compared with: DIR/report.html."),
    ] = None,
    inject: opt.Faults = None,
    period: opt.Period = None,
    delay: opt.Delay = None,
    fragments: opt.Fragments = None,
    outer: opt.Outer = None,
    as_json: opt.Json = False,
) -> None:
    """Train a small CNN on real images with several workers.

    The images are MNIST: 4,000 to train on, 1,000 to test with.
    """
    from commrt.cli import train as command  # noqa: PLC0415  # commands are imported when called
    from commrt.cli.dataset import RECIPES  # noqa: PLC0415
    from commrt.cli.inject_faults import parse  # noqa: PLC0415
    from commrt.cli.training_job import Job  # noqa: PLC0415

    algorithm = algorithm or command.default_algorithm(wire.value)
    if "backup" not in {algorithm, *(compare or [])}:
        _leave_out(f"{algorithm} has no backup workers", {"--backups": backups})
    local = LocalOptions(period, delay, fragments, outer)
    if "local" not in {algorithm, *(compare or [])}:
        _leave_out(f"{algorithm} is not local SGD", local.given())
    lr = RECIPES[recipe.value].lr if lr is None else lr
    faults = tuple(parse(fault) for fault in inject or ())
    job = Job(
        algorithm, epochs, batch_size, lr, seed, wire.value, bucket_cap_mb, timeout_s, start_timeout_s, trace, faults,
        1 if backups is None else backups, recipe.value, report, local,
    )  # fmt: skip
    command.run(job, compare or [], workers, as_json)


@app.command(rich_help_panel=PRICE)
def verify(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="ring, halving_doubling, torus2d, direct, gossip, local or backup. Or a collective: broadcast, "
            "reduce, gather, scatter, all_gather, reduce_scatter, all_reduce, all_to_all or barrier."
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Number of ranks.")] = 4,
    schedule: Annotated[
        str | None, typer.Option(show_default="all", help="For a collective: which schedule to prove.")
    ] = None,
    root: Annotated[
        int | None, typer.Option(min=0, show_default="0", help="For broadcast, reduce, gather and scatter.")
    ] = None,
    grid: opt.Grid = None,
    both_ways: opt.BothWays = False,
    topology: opt.TopologyName = None,
    within: opt.Within = None,
    backups: Annotated[
        int | None, typer.Option(min=0, help="For backup: how many ranks a step does not wait for.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the schedule, step by step.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Prove a schedule, and print its cost.

    The exit code is 1 if the schedule is wrong.
    """
    from commrt.algorithms.catalogue import COLLECTIVES  # noqa: PLC0415  # commands are imported when called
    from commrt.cli import verify as command  # noqa: PLC0415

    shape = {"--grid": grid, "--both-ways": both_ways or None, "--topology": topology, "--within": within}
    if algorithm in COLLECTIVES:
        _leave_out("a collective takes --schedule and --root", shape | {"--backups": backups})
        ok = command.run_collective(algorithm, schedule, ranks, root, show, as_json)
    else:
        _leave_out(f"{algorithm} is no collective", {"--schedule": schedule, "--root": root})
        chosen = command.choose(algorithm, grid, both_ways, topology, within, backups)
        ok = command.run(chosen, ranks, show, as_json)
    if not ok:
        raise typer.Exit(1)


@app.command(rich_help_panel=PRICE)
def simulate(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="ring, halving_doubling, torus2d, direct or gossip; local, for steps of local SGD; or backup, for "
            "steps that wait for some ranks."
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, show_default="4; backup: 100", help="Number of ranks.")
    ] = None,
    cluster: opt.ClusterName = None,
    nbytes: opt.Nbytes = None,
    model: opt.Model = None,
    wire: opt.WireDtype = Wire.fp32,
    bucket_cap_mb: opt.BucketCapMb = 25.0,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, help="How much computing varies: standard deviation / mean.")
    ] = None,
    grid: opt.Grid = None,
    both_ways: opt.BothWays = False,
    topology: opt.TopologyName = None,
    within: opt.Within = None,
    steps: Annotated[
        int | None, typer.Option(min=1, show_default="50; backup: 10000", help="Number of steps to sample.")
    ] = None,
    seed: opt.Seed = 0,
    law: opt.Law = None,
    parameters: opt.Parameters = None,
    times: opt.TimesFile = None,
    exponent: opt.Exponent = None,
    period: opt.Period = None,
    delay: opt.Delay = None,
    fragments: opt.Fragments = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate an exchange or a training step on a cluster.

    You do not need the cluster: its links are described in a file.
    """
    from commrt.cli import simulate as command  # noqa: PLC0415  # commands are imported when called
    from commrt.cli.verify import choose  # noqa: PLC0415

    local = LocalOptions(period, delay, fragments)
    if algorithm != "local":
        _leave_out(f"{algorithm} is not local SGD", local.given())
    if algorithm == "backup":
        exchange = {"--nbytes": nbytes, "--model": model, "--cluster": cluster, "--batch": batch, "--jitter": jitter}
        _leave_out("backup is simulated without exchanges", exchange | {"--compute-ms": compute_ms, "--grid": grid})
        command.run_backups(BackupOptions(ranks, steps, seed, law, parameters or [], times, exponent), as_json)
        return
    times_of_ranks = {"--law": law, "--set": parameters, "--times": times, "--exponent": exponent}
    _leave_out("an exchange is simulated with --jitter", times_of_ranks)
    options = ExchangeOptions(
        ranks or 4, cluster, nbytes, model, wire.value, bucket_cap_mb, batch, compute_ms, jitter, steps, seed
    )
    chosen = choose(algorithm, grid, both_ways, topology, within)
    if algorithm == "local":
        from commrt.cli import simulate_local  # noqa: PLC0415

        simulate_local.run(local, options, as_json)
        return
    command.run(chosen, options, as_json)


@app.command(rich_help_panel=PRICE)
def plan(
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, show_default="4; --backups: 100", help="Number of ranks.")
    ] = None,
    cluster: opt.ClusterName = None,
    nbytes: opt.Nbytes = None,
    model: opt.Model = None,
    wire: Annotated[Wire | None, typer.Option(show_default="fp32 and bf16", help=opt.WIRE_HELP)] = None,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
    collective: Annotated[
        str | None,
        typer.Option(
            help="Plan this collective of torch.distributed instead of training: all_reduce, all_gather, "
            "reduce_scatter, all_to_all, broadcast, reduce, gather, scatter or barrier."
        ),
    ] = None,
    backups: Annotated[
        str | None, typer.Option(help="With --model: auto, or a number of ranks that a step does not wait for.")
    ] = None,
    steps: opt.Steps = None,
    seed: opt.Seed = 0,
    law: opt.Law = None,
    parameters: opt.Parameters = None,
    times: opt.TimesFile = None,
    exponent: opt.Exponent = None,
    as_json: opt.Json = False,
) -> None:
    """Recommend settings for a job, and say why: algorithm, grid, wire and buckets on a cluster.

    With --model and --backups also how many backup workers. With --collective, the schedule of one collective.
    """
    from commrt.cli import plan as command  # noqa: PLC0415  # commands are imported when called

    if collective is not None:
        from commrt.cli import plan_collective  # noqa: PLC0415

        of_training = {"--model": model, "--wire": wire, "--batch": batch, "--backups": backups}
        _leave_out("a collective has no training step", of_training | {"--compute-ms": compute_ms})
        plan_collective.run(collective, ranks or 4, cluster, nbytes, as_json)
        return
    waitings: list[BackupCost] = []
    if backups is None:
        times_of_ranks = {"--law": law, "--set": parameters, "--times": times, "--steps": steps, "--exponent": exponent}
        _leave_out("without --backups no rank is slow", times_of_ranks)
    elif model is None:
        raise UsageError("--backups needs a training step: give --model too, or use commrt simulate backup")
    else:
        backup_options = BackupOptions(ranks, steps, seed, law, parameters or [], times, exponent)
        ranks, waitings = command.waitings(backups, backup_options)
    wires = ["fp32", "bf16"] if wire is None else [wire.value]
    options = ExchangeOptions(ranks or 4, cluster, nbytes, model, wires[0], batch=batch, compute_ms=compute_ms)
    command.run(options, wires, as_json, waitings)


@app.command(rich_help_panel=PRICE)
def draw(
    what: Annotated[
        str,
        typer.Argument(
            help="An algorithm; or scaling, to compare all algorithms; or a file of train --trace, such as trace.json."
        ),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The picture: .svg, .png or .pdf.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65536,
            show_default="4; scaling: up to 4096",
            help="Number of ranks; at most 64 for a schedule without --model.",
        ),
    ] = None,
    cluster: opt.ClusterName = None,
    model: opt.Model = None,
    wire: opt.WireDtype = Wire.fp32,
    bucket_cap_mb: opt.BucketCapMb = 25.0,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
    grid: opt.Grid = None,
    both_ways: opt.BothWays = False,
    topology: opt.TopologyName = None,
    within: opt.Within = None,
    step: Annotated[
        int | None, typer.Option(min=0, show_default="a typical one", help="For a recorded run: the step to draw.")
    ] = None,
) -> None:
    """Draw a schedule, a training step, or how algorithms scale.

    With --model: a simulated step. With a file of train --trace: a recorded step.
    """
    from commrt.cli import draw as command  # noqa: PLC0415  # commands are imported when called
    from commrt.cli.verify import choose  # noqa: PLC0415

    if what.endswith(".json"):
        of_a_plan = {"--ranks": ranks, "--cluster": cluster, "--model": model, "--batch": batch, "--grid": grid}
        _leave_out("a recorded run is drawn as it was", of_a_plan | {"--compute-ms": compute_ms})
        command.draw_recorded(what, step, out)
        return
    _leave_out("only a recorded run has steps", {"--step": step})
    is_scaling = what == command.SCALING
    most = ranks or (4096 if is_scaling else 4)
    options = ExchangeOptions(most, cluster, None, model, wire.value, bucket_cap_mb, batch, compute_ms)
    command.run(None if is_scaling else choose(what, grid, both_ways, topology, within), options, out)


@app.command(rich_help_panel=MACHINE)
def probe(
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write: a cluster description, .toml.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="How long a rank waits for another one, in seconds.")] = 60.0,
) -> None:
    """Measure the links between ranks, for simulate and plan.

    On this machine, or in the job that starts it.
    """
    from commrt.cli import probe as command  # noqa: PLC0415  # commands are imported when called

    command.run(out, workers, timeout_s)


@app.command(rich_help_panel=MACHINE)
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start two processes that exchange data.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Check this machine, and say what to fix.

    Checks packages, host, GPUs and environment variables. Unless --quick is given, two processes exchange data for
    up to 4 seconds. The exit code is 1 if training would fail.
    """
    from commrt.cli import doctor as command  # noqa: PLC0415  # commands are imported when called

    if not command.run(as_json, quick):
        raise typer.Exit(1)


def _leave_out(why: str, options: Mapping[str, object]) -> None:
    """Raise `UsageError` for the first option that was given: it would be ignored."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{why}: leave {given[0]} out")


def main() -> None:
    """Run the command; print an error that commrt raised on purpose as one line, and exit with its code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
    try:
        app()
    except CommrtError as error:
        print(f"commrt: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ScheduleError | DisagreementError) else 1)


def in_one_line(error: CommrtError) -> str:
    """Return the message without control characters, which user input may contain, and shortened."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(error))
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
