# SPDX-License-Identifier: Apache-2.0
"""The options of ``commrt verify``, ``simulate``, ``plan`` and ``draw``; their code is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

from commrt.algorithms.catalogue import ALGORITHMS
from commrt.tools.commands import options as opt

__all__ = ["draw", "plan", "simulate", "verify"]

simulate = typer.Typer(
    no_args_is_help=True,
    help="Estimate an exchange or a training step on a cluster.\n\n"
    "You do not need the cluster: its links are described in a file.",
)
plan = typer.Typer(
    no_args_is_help=True,
    help="Recommend settings for a job, and say why: algorithm, grid, wire and buckets on a cluster.",
)
draw = typer.Typer(no_args_is_help=True, help="Draw a schedule, a training step, or how algorithms scale.")

ONE_HOST = "host"
"""The cluster that the backend takes if COMMRT_CLUSTER is not set, on one host."""


@opt.spread
def verify(
    algorithm: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(ALGORITHMS)}, gossip, local or backup. Or a "
            "collective: broadcast, reduce, gather, scatter, all_gather, reduce_scatter, all_reduce, all_to_all or "
            "barrier."
        ),
    ],
    collective: opt.CollectiveOptions,
    shape: opt.ShapeOptions,
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Number of ranks.")] = 4,
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
    from commrt.tools.commands import verify as command  # noqa: PLC0415

    if algorithm in COLLECTIVES:
        opt.leave_out("a collective takes --schedule and --root", shape.given() | {"--backups": backups})
        ok = command.run_collective(algorithm, collective.schedule, ranks, collective.root, show, as_json)
    else:
        schedule, root = collective
        opt.leave_out(f"{algorithm} is no collective", {"--schedule": schedule, "--root": root})
        ok = command.run(command.choose(algorithm, shape, backups=backups), ranks, show, as_json)
    if not ok:
        raise typer.Exit(1)


@simulate.command("exchange")
@opt.spread
def simulate_exchange(
    algorithm: opt.AlgorithmName, options: opt.ExchangeOptions, shape: opt.ShapeOptions, as_json: opt.Json = False
) -> None:
    """Estimate how long an exchange takes, and what no schedule can beat."""
    from commrt.tools.commands import simulate as command  # noqa: PLC0415  # commands are imported when called

    command.run_exchange(algorithm, options, shape, as_json)


@simulate.command("step")
@opt.spread
def simulate_step(
    algorithm: opt.AlgorithmName,
    options: opt.StepOptions,
    jitter: opt.JitterOptions,
    shape: opt.ShapeOptions,
    as_json: opt.Json = False,
) -> None:
    """Estimate a training step, and how much of its exchange is hidden."""
    from commrt.tools.commands import simulate as command  # noqa: PLC0415  # commands are imported when called

    command.run_step(algorithm, options, jitter, shape, as_json)


@simulate.command("local")
@opt.spread
def simulate_local(options: opt.StepOptions, local: opt.LocalOptions, as_json: opt.Json = False) -> None:
    """Estimate steps of local SGD, by how late averages may be."""
    from commrt.tools.commands import simulate_local as command  # noqa: PLC0415  # commands are imported when called

    command.run(options, local, as_json)


@simulate.command("backups")
@opt.spread
def simulate_backups(options: opt.BackupOptions, as_json: opt.Json = False) -> None:
    """Estimate steps that wait for some of the ranks, and recommend how many backups to use."""
    from commrt.tools.commands import simulate_backups as command  # noqa: PLC0415  # commands are imported when called

    command.run(options, as_json)


@plan.command("exchange")
@opt.spread
def plan_exchange(options: opt.ExchangeOptions, as_json: opt.Json = False) -> None:
    """Recommend an algorithm for an exchange."""
    from commrt.tools.commands import plan as command  # noqa: PLC0415  # commands are imported when called

    command.run_exchange(options, as_json)


@plan.command("step")
@opt.spread
def plan_step(options: opt.PlanOptions, ranks: opt.Ranks = 4, as_json: opt.Json = False) -> None:
    """Recommend algorithm, wire and buckets for a training step."""
    from commrt.tools.commands import plan as command  # noqa: PLC0415  # commands are imported when called

    command.run_step(options, ranks, as_json)


@plan.command("backups")
@opt.spread
def plan_backups(
    options: opt.PlanOptions,
    slow: opt.BackupOptions,
    backups: Annotated[str, typer.Option(help="auto, or a number of ranks that a step does not wait for.")] = "auto",
    as_json: opt.Json = False,
) -> None:
    """Recommend how many backup workers a training step has, and algorithm, wire and buckets with them."""
    from commrt.tools.commands import plan as command  # noqa: PLC0415  # commands are imported when called

    command.run_backups(backups, options, slow, as_json)


@plan.command("collective")
def plan_collective(
    name: Annotated[
        str,
        typer.Argument(
            help="A collective of torch.distributed: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
            "reduce, gather, scatter or barrier."
        ),
    ],
    nbytes: Annotated[
        float | None,
        typer.Option(
            min=0, callback=opt.below(1e18), help="Bytes of the tensor that holds all ranks' pieces; not for barrier."
        ),
    ] = None,
    ranks: opt.Ranks = 4,
    cluster: opt.ClusterName = ONE_HOST,
    as_json: opt.Json = False,
) -> None:
    """Say which schedule the torch.distributed backend takes for a collective, and why."""
    from commrt.tools.commands import plan_collective as command  # noqa: PLC0415  # commands are imported when called

    command.run(name, ranks, cluster, nbytes, as_json)


@draw.command("schedule")
@opt.spread
def draw_schedule(
    algorithm: opt.AlgorithmName,
    out: opt.Out,
    shape: opt.ShapeOptions,
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="Number of ranks, at most 64.")] = 4,
    cluster: opt.ClusterName = opt.CLUSTER,
) -> None:
    """Draw a schedule: an arrow for each transfer."""
    from commrt.tools.commands import draw as command  # noqa: PLC0415  # commands are imported when called

    command.draw_schedule_of(algorithm, shape, ranks, cluster, out)


@draw.command("step")
@opt.spread
def draw_step(algorithm: opt.AlgorithmName, out: opt.Out, options: opt.StepOptions, shape: opt.ShapeOptions) -> None:
    """Draw a simulated training step, and what of its exchange is not hidden."""
    from commrt.tools.commands import draw as command  # noqa: PLC0415  # commands are imported when called

    command.draw_step(algorithm, options, shape, out)


@draw.command("scaling")
def draw_scaling(
    out: opt.Out,
    model: opt.Model,
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="The largest number of ranks.")] = 4096,
    cluster: opt.ClusterName = opt.CLUSTER,
    wire: opt.WireDtype = opt.Wire.fp32,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
) -> None:
    """Draw the efficiency of all algorithms over the number of ranks."""
    from commrt.tools.commands import draw as command  # noqa: PLC0415  # commands are imported when called

    options = opt.StepOptions(model, ranks, cluster, wire, batch=batch, compute_ms=compute_ms)
    command.draw_scaling_of(options, out)


@draw.command("recorded")
def draw_recorded(
    file: Annotated[str, typer.Argument(help="The timeline of a run, such as trace.json.")],
    out: opt.Out,
    step: Annotated[int | None, typer.Option(min=0, show_default="a typical one", help="The step to draw.")] = None,
) -> None:
    """Draw a step of a run."""
    from commrt.tools.commands import draw as command  # noqa: PLC0415  # commands are imported when called

    command.draw_recorded(file, step, out)
