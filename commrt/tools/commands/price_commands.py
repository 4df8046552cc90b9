# SPDX-License-Identifier: Apache-2.0
"""The options of ``commrt verify``, ``simulate`` and ``draw``; their code is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

from commrt.pricing.cluster import Cluster
from commrt.tools.commands import options as opt
from commrt.tools.commands.options import (
    CLUSTER,
    BackupOptions,
    ExchangeOptions,
    LocalOptions,
    ShapeOptions,
    Wire,
    leave_out,
)

__all__ = ["draw", "simulate", "verify"]


def verify(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="ring, rings, halving_doubling, double_tree, torus2d, direct, gossip, local or backup. Or a "
            "collective: broadcast, reduce, gather, scatter, all_gather, reduce_scatter, all_reduce, all_to_all or "
            "barrier."
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
    rings: opt.RingCount = None,
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

    shape = ShapeOptions(grid, both_ways, topology, within, rings)
    if algorithm in COLLECTIVES:
        leave_out("a collective takes --schedule and --root", shape.given() | {"--backups": backups})
        ok = command.run_collective(algorithm, schedule, ranks, root, show, as_json)
    else:
        leave_out(f"{algorithm} is no collective", {"--schedule": schedule, "--root": root})
        chosen = command.choose(algorithm, shape, backups=backups)
        ok = command.run(chosen, ranks, show, as_json)
    if not ok:
        raise typer.Exit(1)


def simulate(
    algorithm: Annotated[
        str,
        typer.Argument(
            help="ring, halving_doubling, torus2d, direct or gossip; local, for steps of local SGD; or "
            "backup, for steps that wait for some ranks."
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
    rings: opt.RingCount = None,
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
    from commrt.tools.commands import simulate as command  # noqa: PLC0415  # commands are imported when called
    from commrt.tools.commands.verify import choose  # noqa: PLC0415

    local = LocalOptions(period, delay, fragments)
    if algorithm != "local":
        leave_out(f"{algorithm} is not local SGD", local.given())
    if algorithm == "backup":
        exchange = {"--nbytes": nbytes, "--model": model, "--cluster": cluster, "--batch": batch, "--jitter": jitter}
        leave_out("backup is simulated without exchanges", exchange | {"--compute-ms": compute_ms, "--grid": grid})
        command.run_backups(BackupOptions(ranks, steps, seed, law, parameters or [], times, exponent), as_json)
        return
    times_of_ranks = {"--law": law, "--set": parameters, "--times": times, "--exponent": exponent}
    leave_out("an exchange is simulated with --jitter", times_of_ranks)
    options = ExchangeOptions(
        ranks or 4, cluster, nbytes, model, wire.value, bucket_cap_mb, batch, compute_ms, jitter, steps, seed
    )
    shape = ShapeOptions(grid, both_ways, topology, within, rings)
    chosen = choose(algorithm, shape, Cluster.named(cluster or CLUSTER))
    if algorithm == "local":
        from commrt.tools.commands import simulate_local  # noqa: PLC0415

        simulate_local.run(local, options, as_json)
        return
    command.run(chosen, options, as_json)


def draw(
    what: Annotated[
        str,
        typer.Argument(
            help="An algorithm; or scaling, to compare all algorithms; or the timeline of a run, such as trace.json."
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
    rings: opt.RingCount = None,
    step: Annotated[
        int | None, typer.Option(min=0, show_default="a typical one", help="For a recorded run: the step to draw.")
    ] = None,
) -> None:
    """Draw a schedule, a training step, or how algorithms scale.

    With --model: a simulated step. With a timeline: a recorded step.
    """
    from commrt.tools.commands import draw as command  # noqa: PLC0415  # commands are imported when called
    from commrt.tools.commands.verify import choose  # noqa: PLC0415

    if what.endswith(".json"):
        of_a_plan = {"--ranks": ranks, "--cluster": cluster, "--model": model, "--batch": batch, "--grid": grid}
        leave_out("a recorded run is drawn as it was", of_a_plan | {"--compute-ms": compute_ms})
        command.draw_recorded(what, step, out)
        return
    leave_out("only a recorded run has steps", {"--step": step})
    is_scaling = what == command.SCALING
    most = ranks or (4096 if is_scaling else 4)
    options = ExchangeOptions(most, cluster, None, model, wire.value, bucket_cap_mb, batch, compute_ms)
    shape = ShapeOptions(grid, both_ways, topology, within, rings)
    command.run(None if is_scaling else choose(what, shape, Cluster.named(cluster or CLUSTER)), options, out)
