# SPDX-License-Identifier: Apache-2.0
"""The command ``commrt``, and the options of what trains or looks at a machine. Code is imported when it is called."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import commrt
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.tools.commands import options as opt
from commrt.tools.commands import price_commands as commands
from commrt.tools.commands.options import LocalOptions, RecipeName, Wire, leave_out
from commrt.tools.commands.plan_command import plan

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
            help="ring, rings, halving_doubling, double_tree, torus2d, direct, gossip, local, backup, or ddp for DDP.",
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
    curve: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the loss of each step to this file, and how noisy the gradients are."),
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
    from commrt.tools.commands import train as command  # noqa: PLC0415  # commands are imported when called
    from commrt.tools.commands.dataset import RECIPES  # noqa: PLC0415
    from commrt.tools.commands.inject_faults import parse  # noqa: PLC0415
    from commrt.tools.commands.training_job import Job  # noqa: PLC0415

    algorithm = algorithm or command.default_algorithm(wire.value)
    if "backup" not in {algorithm, *(compare or [])}:
        leave_out(f"{algorithm} has no backup workers", {"--backups": backups})
    local = LocalOptions(period, delay, fragments, outer)
    if "local" not in {algorithm, *(compare or [])}:
        leave_out(f"{algorithm} is not local SGD", local.given())
    lr = RECIPES[recipe.value].lr if lr is None else lr
    faults = tuple(parse(fault) for fault in inject or ())
    job = Job(
        algorithm, epochs, batch_size, lr, seed, wire.value, bucket_cap_mb, timeout_s, start_timeout_s, trace, faults,
        1 if backups is None else backups, recipe.value, report, local, curve,
    )  # fmt: skip
    command.run(job, compare or [], workers, as_json)


for command_ in (commands.verify, commands.simulate, plan, commands.draw):
    app.command(rich_help_panel=PRICE)(command_)


@app.command(rich_help_panel=MACHINE)
def probe(
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write: a cluster description, .toml.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="How long a rank waits for another one, in seconds.")] = 60.0,
) -> None:
    """Measure the links between ranks, for simulate and plan.

    On this machine, or in the job that starts it.
    """
    from commrt.tools.commands import probe as command  # noqa: PLC0415  # commands are imported when called

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
    from commrt.tools.commands import doctor as command  # noqa: PLC0415  # commands are imported when called

    if not command.run(as_json, quick):
        raise typer.Exit(1)


def main(program: typer.Typer = app) -> None:
    """Run `program`; print an error that commrt raised on purpose as one line, and exit with its code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
    try:
        program()
    except CommrtError as error:
        print(f"commrt: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ScheduleError | DisagreementError) else 1)


def in_one_line(error: CommrtError) -> str:
    """Return the message without control characters, which user input may contain, and shortened."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(error))
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
