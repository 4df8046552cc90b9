# SPDX-License-Identifier: Apache-2.0
"""Train a small CNN on MNIST with several workers.

Run ``python examples/mnist/train.py --workers 4 --compare ddp``.
Begin to read at `train_rank`: it is what each rank does, from `commrt.init` to its result.
`replicated` has the line that makes a model data-parallel. `train` has the options. The modules
beside this one do the rest.
"""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from typing import Annotated

import torch
import typer
from dataset import Feed, Images, lenet
from ddp_replica import DdpReplica, ddp_group
from inject_faults import Injection, parse
from job import ALGORITHMS, BACKUP, DDP, LOCAL, WIRES, Job, LocalSettings
from recipes import RECIPES
from result import Result, result_of
from run_jobs import Progress, default_algorithm, run
from run_recorder import RunRecorder
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import commrt
from commrt.data.large_batch import Rate
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import Wire, leave_out

__all__ = ["app", "replicated", "train_rank"]


def train_rank(job: Job, data: tuple[Images, Images], show: Progress) -> Result:
    """Train as one rank of the world that this process was launched into; collective."""
    torch.set_num_threads(1)  # the ranks of a machine share its cores
    train_images, test_images = data
    joined = commrt.init(job.timeout_s, start_timeout_s=job.start_timeout_s)
    with joined as world, ddp_group(world) if job.algorithm == DDP else nullcontext():
        model = lenet(job.seed)
        recipe = job.recipe
        batches = job.batches((world.rank, world.size))  # other images on each rank, as many on all
        optimizer = recipe.optimizer(model, job.lr)
        rate = recipe.rate(optimizer, batches, job.epochs)
        replica = replicated(job, world, model, optimizer, rate)

        feed = Feed(train_images, batches)
        steps = job.steps(world.size)
        faults = Injection(job.inject, job.seed, world.rank)
        recorder = RunRecorder(world, replica, job.trace)
        # the step of all ranks: a late one takes it from the others
        while (step := replica.step) < steps:
            pixels, digits = feed.batch(step)
            faults.begin_step()
            optimizer.zero_grad()
            with recorder.range("forward"):
                loss = cross_entropy(
                    replica.model(pixels), digits, label_smoothing=recipe.smoothing
                )
            faults.compute()
            with recorder.range("backward"):
                loss.backward()  # gradients leave while it runs, and are averaged when it returns
            with recorder.range("optimizer"):
                optimizer.step()
            rate.step()
            recorder.end_step(len(digits))
            show(replica.step, loss.item(), replica.stats())
        return result_of(job, world, replica, model, test_images, recorder.stop())


def replicated(
    job: Job, world: commrt.World, model: nn.Module, optimizer: Optimizer, rate: LRScheduler | Rate
) -> commrt.Replica | DdpReplica:
    """Copy rank 0's weights to all ranks, and let `job`'s algorithm average gradients or weights
    from now on.
    """
    wire = WIRES[job.wire]
    if job.algorithm == DDP:
        return DdpReplica(
            model, optimizer, job.bucket_cap_mb, wire if isinstance(wire, torch.dtype) else None
        )
    return commrt.attach(
        model,
        optimizer,
        job.chosen(),
        world=world,
        wire=wire,
        bucket_cap_mb=job.bucket_cap_mb,
        also=[rate],
    )


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
RecipeName = StrEnum("RecipeName", {"plain": "plain", "large_batch": "large-batch"})


@app.command()
def train(
    workers: Annotated[
        int,
        typer.Option(
            help="Local worker processes; ignored under torchrun, mpirun, or srun of several tasks."
        ),
    ] = 4,
    algorithm: Annotated[
        str | None,
        typer.Option(
            show_default="torus2d; direct for a wire of codes",
            help=f"{', '.join(ALGORITHMS)}, or ddp for DDP.",
        ),
    ] = None,
    backups: Annotated[
        int | None,
        typer.Option(
            min=0, show_default="1", help="For backup: how many workers a step does not wait for."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Train again with this algorithm; repeatable.")
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Passes over the 4,000 training images.")
    ] = 10,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images per step, over all workers together.")
    ] = 64,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0.0, show_default="0.05; large-batch: 1", help="The highest learning rate."
        ),
    ] = None,
    recipe: Annotated[
        RecipeName,
        typer.Option(
            help=(
                "plain: SGD with momentum 0.9 and a cosine learning rate. large-batch: LARS, a"
                " warm-up of one epoch, "
                "label smoothing, and batches four times as large after a third of the epochs."
            )
        ),
    ] = RecipeName.plain,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32, help="Seed of the initial weights and of the order of images."
        ),
    ] = 0,
    wire: opt.WireDtype = Wire.fp32,
    bucket_cap_mb: opt.BucketCapMb = 25.0,
    timeout_s: Annotated[
        float,
        typer.Option(
            envvar="COMMRT_TIMEOUT_S", help="How long a worker waits for another one, in seconds."
        ),
    ] = 60.0,
    start_timeout_s: Annotated[
        float | None,
        typer.Option(
            show_default="twice --timeout-s, but at least 300",
            help="How long to wait for all workers to start, in s.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Write a timeline of all workers to this file, for ui.perfetto.dev."),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help=(
                "Inject a fault into each run; repeatable. slow:rank=2,prob=0.1,seconds=0.5: rank 2"
                " (every rank if "
                "none is named) computes that much longer in a tenth of its steps."
                " slow:prob=0.03,low=5,high=20: 5 to 20 "
                "times as long. kill:rank=3,step=20: SIGKILL when that step begins, counted"
                " from 0. "
                "stop:rank=1,step=30,seconds=5: SIGSTOP for so many seconds."
            ),
        ),
    ] = None,
    period: opt.Period = None,
    delay: opt.Delay = None,
    fragments: opt.Fragments = None,
    outer: Annotated[
        str | None,
        opt.local_option(
            metavar="RATE,MOMENTUM",
            show_default="the average replaces the weights",
            help="Move the weights towards the average with Nesterov momentum, such as 0.7,0.5.",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Train a small CNN on real images with several workers.

    The images are MNIST: 4,000 to train on, 1,000 to test with.
    Exit codes: 0 success, 1 runtime failure, 2 invalid input, 130 interrupted.
    """
    algorithm = algorithm or default_algorithm(wire.value)
    if BACKUP not in {algorithm, *(compare or [])}:
        leave_out(f"{algorithm} has no backup workers", {"--backups": backups})
    local = LocalSettings(period, delay, fragments, outer)
    if LOCAL not in {algorithm, *(compare or [])}:
        leave_out(f"{algorithm} is not local SGD", local.given())
    job = Job(
        algorithm=algorithm,
        epochs=epochs,
        batch_size=batch_size,
        lr=RECIPES[recipe.value].lr if lr is None else lr,
        seed=seed,
        wire=wire.value,
        bucket_cap_mb=bucket_cap_mb,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        trace=trace,
        inject=tuple(parse(fault) for fault in inject or ()),
        backups=1 if backups is None else backups,
        recipe_name=recipe.value,
        local=local,
    )
    run(train_rank, job, compare or [], workers, as_json)


if __name__ == "__main__":
    main(app)
