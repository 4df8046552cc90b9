# SPDX-License-Identifier: Apache-2.0
"""One training run of ``commrt train``, as each of its workers runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.catalogue import ALGORITHMS, BACKUP, GOSSIP, by_name
from commrt.attaching import attach
from commrt.cli.averaging import Attached, Averaging, Cost, Wrapped
from commrt.cli.history import Notes, Record, gathered, noted
from commrt.cli.inject import Fault, Injection, Kill, check
from commrt.cli.mnist import TRAIN_IMAGES, Images, lenet
from commrt.cli.recipes import PLAIN, RECIPES, Feed, batches, images_after, require_fit, steps
from commrt.cli.tracing import check_file, traced
from commrt.errors import UsageError
from commrt.membership.launcher import is_timeout
from commrt.model.state import fingerprint
from commrt.recipe import BatchSizeControl, Rate
from commrt.recording import within_range
from commrt.runtime.opening import init
from commrt.runtime.world import World

__all__ = ["DDP", "Job", "Progress", "Result", "ddp_group", "work"]

DDP = "ddp"
SEEDS = range(-(2**63), 2**64)
"""What torch takes."""
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int, float, Cost], None]
"""Called after each step with how many have been done, the loss, and what averaging has cost."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, and how."""

    algorithm: str
    epochs: int
    batch_size: int
    lr: float
    seed: int
    wire: str
    bucket_cap_mb: float
    timeout_s: float
    start_timeout_s: float
    trace: str | None = None
    """File for a timeline of all ranks."""
    inject: tuple[Fault, ...] = ()
    """What goes wrong."""
    backups: int = 1
    """For backup: how many of the workers need not be waited for."""
    recipe: str = PLAIN
    """One of `RECIPES`."""
    report: str | None = None
    """Folder for a page about the run."""

    def check(self, workers: int) -> None:
        """Raise `UsageError` for what cannot work, before any process starts."""
        if workers < 1:
            raise UsageError(f"--workers {workers}: at least one worker must do the work")
        if self.algorithm not in (offered := (*ALGORITHMS, GOSSIP, BACKUP, DDP)):
            names = ", ".join(sorted(offered))
            raise UsageError(f"no algorithm is called {self.algorithm!r}: choose one of {names}")
        if not workers <= self.batch_size <= TRAIN_IMAGES:
            raise UsageError(
                f"--batch-size {self.batch_size} must give each of {workers} workers an image, and there are "
                f"{TRAIN_IMAGES} to train on"
            )
        self._check_numbers()
        require_fit(self.recipe, self.batch_size, self.epochs)
        if self.algorithm == BACKUP:
            BackupWorkers(self.backups).needed(workers)
        for fault in self.inject:
            check(fault, workers, self.steps(workers))
        if len(self.successors()) < sum(isinstance(fault, Kill) and fault.back is not None for fault in self.inject):
            raise UsageError("--inject kill: one rank twice with back=: the process that takes its place is not killed")
        if self.successors() and self.algorithm != BACKUP:
            raise UsageError(
                f"--inject kill: with {self.algorithm} no process can take a dead one's place: leave back= out"
            )
        if self.trace is not None:
            check_file(self.trace)

    def _check_numbers(self) -> None:
        for option, limit in (("--timeout-s", self.timeout_s), ("--start-timeout-s", self.start_timeout_s)):
            if not is_timeout(limit):
                raise UsageError(f"{option} {limit:g} is no deadline: give seconds, above 0 and up to 2,000,000")
        if not 0 < self.bucket_cap_mb < inf:
            raise UsageError(f"--bucket-cap-mb {self.bucket_cap_mb:g} is no size: give a positive number, such as 25")
        if not 0 <= self.lr < inf:
            raise UsageError(f"--lr {self.lr:g} is no learning rate: give a finite number that is not negative")
        if not (self.epochs >= 1 and SEEDS.start <= self.seed <= SEEDS.stop - self.epochs):
            raise UsageError(
                f"--seed {self.seed} with --epochs {self.epochs}: each epoch needs a seed of its own in "
                f"{SEEDS.start}..{SEEDS.stop - 1}"
            )

    def steps(self, workers: int) -> int:
        """Steps of the whole run."""
        return steps(self.batches((0, workers)), self.epochs)

    def batches(self, place: tuple[int, int]) -> BatchSizeControl:
        """Of rank, workers = `place`."""
        return batches(RECIPES[self.recipe], place, self.batch_size // place[1], self.epochs, self.seed)

    def successors(self) -> dict[int, float]:
        """The ranks whose place another process takes, and how many seconds after their death."""
        return {fault.rank: fault.back for fault in self.inject if isinstance(fault, Kill) and fault.back is not None}

    def outlives(self, workers: int) -> int:
        """How many of so many workers may die without ending the run."""
        return {GOSSIP: workers - 1, BACKUP: self.backups}.get(self.algorithm, 0)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run showed; times are those of the first rank that is left, means over the steps that it was there for."""

    algorithm: str
    recipe: str
    workers: int
    wire: str
    epochs: int
    steps: int
    test_accuracy: float
    disagreement: float
    """How far the farthest replica was from the mean of all at the end, relative to it; then they were made equal."""
    replicas_equal: bool
    images_per_second: float
    step_seconds: float
    exposed_comm_seconds: float
    comm_seconds: float | None
    bytes_sent_per_step: int | None
    fingerprint: str
    lost: tuple[int, ...]
    """Ranks without which the others went on."""
    late: dict[int, int]
    """By rank, gradients that came too late and were dropped."""
    saved_seconds: float
    """How long all would have waited for these, added up; where two were late in a step they count twice."""
    record: Record | None = field(default=None, repr=False, compare=False)
    """For a report: what each step was; with the first rank that is left."""

    def facts(self) -> dict[str, Any]:
        """All but the record, for JSON."""
        known = asdict(replace(self, record=None))
        known.pop("record")
        return known


class _Stretch(NamedTuple):
    """What one process saw of the training; who takes the place of another comes in the middle."""

    begin: int
    """The first step."""
    end: int
    """The step after the last."""
    seconds: float

    @property
    def steps(self) -> int:
        """How many; at least one, by which something may be divided."""
        return max(self.end - self.begin, 1)


def work(job: Job, data: tuple[Images, Images], progress: Progress) -> Result:
    """Train as one rank of the world that this process was launched into; collective."""
    torch.set_num_threads(1)
    joined = init(job.timeout_s, start_timeout_s=job.start_timeout_s)
    with joined as world, ddp_group(world) if job.algorithm == DDP else nullcontext():
        faults = job.inject if world.config is None else tuple(one for one in job.inject if not isinstance(one, Kill))
        model = lenet(job.seed)
        recipe, batches = RECIPES[job.recipe], job.batches((world.rank, world.size))
        optimizer = recipe.optimizer(model, job.lr)
        rate = recipe.rate(optimizer, batches, job.epochs)
        averaging = _averaging(job, world, model, optimizer, rate)
        begin, begin_s = averaging.step, perf_counter()
        with traced(world, job.trace), noted(world, wanted=job.report is not None) as notes:
            loop = _Loop(world, averaging, optimizer, rate, progress, notes)
            loop.train(replace(job, inject=faults), Feed(data[0], batches))
            stretch = _Stretch(begin, job.steps(world.size), perf_counter() - begin_s)
        result = _result(job, data[1], world, averaging, model, stretch)
        if notes is None:
            return result
        notes.share(averaging.last())  # gossip's last step has been mixed since
        return replace(result, record=gathered(world, notes))


@contextmanager
def ddp_group(world: World) -> Iterator[None]:
    """Torch's default group, of the ranks and on the store of `world`, whoever launched them."""
    store, limit = PrefixStore(DDP, world.store), timedelta(seconds=world.timeout_s)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _averaging(job: Job, world: World, model: nn.Module, optimizer: Optimizer, rate: LRScheduler | Rate) -> Averaging:
    wire = WIRES[job.wire]
    if job.algorithm == DDP:
        return Wrapped(model, job.bucket_cap_mb, wire)
    algorithm = BackupWorkers(job.backups) if job.algorithm == BACKUP else by_name(job.algorithm)
    replica = attach(model, optimizer, algorithm, world=world, wire=wire, bucket_cap_mb=job.bucket_cap_mb, also=[rate])
    return Attached(replica)


@dataclass(frozen=True, slots=True)
class _Loop:
    """What trains."""

    world: World
    averaging: Averaging
    optimizer: Optimizer
    rate: LRScheduler | Rate
    progress: Progress
    notes: Notes | None

    def train(self, job: Job, feed: Feed) -> None:
        """All steps of `job`."""
        world, averaging = self.world, self.averaging
        injected = Injection(job.inject, job.seed, world.rank)
        end, smoothing = job.steps(world.size), RECIPES[job.recipe].smoothing
        while (step := averaging.step) < end:
            pixels, digits = feed.batch(step)
            injected.begin_step()
            self.optimizer.zero_grad()
            with within_range(world.recorder, "forward"):
                outputs = averaging.model(pixels)
                loss = cross_entropy(outputs, digits, label_smoothing=smoothing)
            injected.compute()
            with within_range(world.recorder, "backward"):
                averaging.backward(loss)
            with within_range(world.recorder, "optimizer"):
                self.optimizer.step()
            self.rate.step()
            self.progress(averaging.step, loss.item(), averaging.cost())
            if self.notes is not None:
                self.notes.take(step, loss.item(), outputs, digits, averaging.last())


def _result(job: Job, test: Images, world: World, averaging: Averaging, model: nn.Module, stretch: _Stretch) -> Result:
    steps, apart, cost = stretch.steps, averaging.finish(), averaging.cost()
    mark = fingerprint(model)
    told = _told(world, f"{cost.late} {cost.late_s}")
    return Result(
        algorithm=job.algorithm,
        recipe=job.recipe,
        workers=world.size,
        wire=job.wire,
        epochs=job.epochs,
        steps=stretch.end,
        test_accuracy=_accuracy(model, test.pixels, test.digits),
        disagreement=apart,
        replicas_equal=world.all_equal("trained model", mark),
        images_per_second=_images(job, world, stretch) / stretch.seconds,
        step_seconds=stretch.seconds / steps,
        exposed_comm_seconds=cost.exposed_s / steps,
        comm_seconds=None if cost.comm_s is None else cost.comm_s / steps,
        bytes_sent_per_step=None if cost.nbytes_sent is None else cost.nbytes_sent // steps,
        fingerprint=mark,
        lost=tuple(loss.rank for loss in world.lost),
        late={rank: int(said.split()[0]) for rank, said in told.items()},
        saved_seconds=sum(float(said.split()[1]) for said in told.values()),
    )


def _images(job: Job, world: World, stretch: _Stretch) -> int:
    """How many all ranks have used."""
    control = job.batches((world.rank, world.size))

    def of_a_rank(begin: int) -> int:
        return images_after(control, stretch.end) - images_after(control, begin)

    if job.algorithm == BACKUP:
        return (world.size - job.backups) * of_a_rank(stretch.begin)
    unused = sum(of_a_rank(max(loss.step, stretch.begin)) for loss in world.lost)
    return world.size * of_a_rank(stretch.begin) - unused


def _told(world: World, mine: str) -> dict[int, str]:
    """What every rank that is left has to tell."""
    shelf = PrefixStore("told", world.store)
    shelf.set(str(world.rank), mine)
    world.agree("told")
    return {rank: shelf.get(str(rank)).decode() for rank in world.members}


def _accuracy(model: nn.Module, pixels: Tensor, digits: Tensor) -> float:
    with torch.no_grad():
        right = model(pixels).argmax(dim=1) == digits
    return float(right.float().mean())
