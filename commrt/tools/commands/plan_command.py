# SPDX-License-Identifier: Apache-2.0
"""The options of ``commrt plan``, and which of its plans they ask for; the code of each is imported late."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from commrt.errors import UsageError
from commrt.tools.commands import options as opt
from commrt.tools.commands.options import BackupOptions, ExchangeOptions, Wire, leave_out

__all__ = ["plan"]


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
    seed: opt.SeedOfTimes = None,
    law: opt.Law = None,
    parameters: opt.Parameters = None,
    times: opt.TimesFile = None,
    exponent: opt.Exponent = None,
    as_json: opt.Json = False,
) -> None:
    """Recommend settings for a job, and say why: algorithm, grid, wire and buckets on a cluster.

    With --model and --backups also how many backup workers. With --collective, the schedule of one collective.
    """
    options = ExchangeOptions(
        ranks or 4, cluster, nbytes, model, "fp32" if wire is None else wire.value, batch=batch, compute_ms=compute_ms
    )
    slow = BackupOptions(ranks, steps, seed or 0, law, parameters or [], times, exponent)
    if collective is not None:
        from commrt.tools.commands import plan_collective  # noqa: PLC0415  # the code of each plan is imported when it is asked for

        of_a_step = {"--model": model, "--wire": wire, "--batch": batch, "--compute-ms": compute_ms}
        of_slow_ranks = {"--backups": backups, "--seed": seed} | slow.given()
        leave_out("a collective has no training step", of_a_step | of_slow_ranks)
        plan_collective.run(collective, options.ranks, cluster, nbytes, as_json)
        return
    if backups is None:
        leave_out("without --backups no rank is slow", {"--seed": seed} | slow.given())
    _plan_training(options, _wires(wire), backups, slow, as_json)


def _wires(wire: Wire | None) -> list[str]:
    return ["fp32", "bf16"] if wire is None else [wire.value]


def _plan_training(
    options: ExchangeOptions, wires: list[str], backups: str | None, slow: BackupOptions, as_json: bool
) -> None:
    from commrt.tools.commands import plan as command  # noqa: PLC0415  # imported when called

    if backups is None:
        command.run(options, wires, as_json)
        return
    if options.model is None:
        raise UsageError("--backups needs a training step: give --model too, or use commrt simulate backup")
    ranks, waitings = command.waitings(backups, slow)
    command.run(replace(options, ranks=ranks), wires, as_json, waitings)
