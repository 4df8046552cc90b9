# SPDX-License-Identifier: Apache-2.0
"""One training run of ``commrt train``: its settings, what each worker does, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.catalogue import ALGORITHMS, BACKUP, GOSSIP, by_name
from commrt.cli import dataset
from commrt.cli.dataset import RECIPES, TRAIN_IMAGES, Images, lenet
from commrt.cli.inject_faults import Fault, Injection, check
from commrt.errors import UsageError
from commrt.membership.launcher import is_timeout
from commrt.report.files import require_writable
from commrt.report.history import gather_record, recording_history, recording_timeline
from commrt.report.tables import Result
from commrt.runtime.init import init
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.training.attach import attach
from commrt.training.hooks import on_gradient
from commrt.training.large_batch import BatchSizeControl, Rate
from commrt.training.model_state import fingerprint
from commrt.training.replica import Replica, Stats, StepReport

__all__ = ["DDP", "DdpReplica", "Job", "Progress", "ddp_group", "work"]

DDP = "ddp"
SEEDS = range(-(2**63), 2**64)
"""Seeds that torch accepts."""
SECONDS = "give seconds, above 0 and up to 2,000,000"
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DDP_HOOKS = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}

Progress = Callable[[int, float, Stats], None]
"""Called after each step with the number of steps done, the loss, and the totals of communication."""


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of a run."""

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
    backups: int = 1
    """For algorithm backup: how many workers a step does not wait for."""
    recipe: str = dataset.PLAIN
    """A name in `RECIPES`."""
    report: str | None = None
    """Folder for a page about the run."""

    def check(self, workers: int) -> None:
        """Raise `UsageError` for settings that cannot work, before any process starts."""
        if workers < 1:
            raise UsageError(f"--workers {workers}: give at least 1")
        if self.algorithm not in (offered := (*ALGORITHMS, GOSSIP, BACKUP, DDP)):
            names = ", ".join(sorted(offered))
            raise UsageError(f"no algorithm is called {self.algorithm!r}: choose one of {names}")
        if not workers <= self.batch_size <= TRAIN_IMAGES:
            raise UsageError(
                f"--batch-size {self.batch_size}: each of {workers} workers needs an image, and there are "
                f"{TRAIN_IMAGES} to train on"
            )
        self._check_numbers()
        dataset.require_fit(self.recipe, self.batch_size, self.epochs)
        if self.algorithm == BACKUP:
            BackupWorkers(self.backups).needed(workers)
        self._check_faults(workers)
        if self.trace is not None:
            require_writable("--trace", self.trace, "trace.json")

    def _check_numbers(self) -> None:
        for option, value, is_valid, advice in (
            ("--timeout-s", self.timeout_s, is_timeout(self.timeout_s), SECONDS),
            ("--start-timeout-s", self.start_timeout_s, is_timeout(self.start_timeout_s), SECONDS),
            ("--bucket-cap-mb", self.bucket_cap_mb, 0 < self.bucket_cap_mb < inf, "give a number above 0, such as 25"),
            ("--lr", self.lr, 0 <= self.lr < inf, "give a finite number, 0 or more"),
        ):
            if not is_valid:
                raise UsageError(f"{option} {value:g}: {advice}")
        if not (self.epochs >= 1 and SEEDS.start <= self.seed <= SEEDS.stop - self.epochs):
            raise UsageError(
                f"--seed {self.seed} with --epochs {self.epochs}: each epoch needs a seed of its own in "
                f"{SEEDS.start}..{SEEDS.stop - 1}"
            )

    def _check_faults(self, workers: int) -> None:
        for fault in self.inject:
            check(fault, workers, self.steps(workers))
        replaced = [fault for fault in self.inject if fault.back is not None]
        if len(self.replacements()) < len(replaced):
            raise UsageError("--inject kill: give back= once for each rank, since the replacement is not killed again")
        if replaced and self.algorithm != BACKUP:
            raise UsageError(f"--inject kill: {self.algorithm} cannot replace a dead process: leave back= out")

    def steps(self, workers: int) -> int:
        """Return the number of steps of the run."""
        return self.batches((0, workers)).updates_after(self.epochs)

    def batches(self, place: tuple[int, int]) -> BatchSizeControl:
        """Return the batches of `place` = (rank, workers)."""
        return dataset.batches(RECIPES[self.recipe], place, self.batch_size // place[1], self.epochs, self.seed)

    def replacements(self) -> dict[int, float]:
        """Return the ranks that another process replaces, and how many seconds after their death."""
        return {each.rank: each.back for each in self.inject if each.rank is not None and each.back is not None}

    def outlives(self, workers: int) -> int:
        """Return how many of `workers` workers may die without ending the run."""
        return {GOSSIP: workers - 1, BACKUP: self.backups}.get(self.algorithm, 0)


class DdpReplica:
    """torch's DDP with the members of `Replica` that a run uses.

    The exposed time is the one from the last gradient to the optimizer's step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, bucket_cap_mb: float, wire: torch.dtype | None) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        if wire is not None:  # DDP refuses the bf16 hook on CPUs by its name, although Gloo supports bf16
            self.model.register_comm_hook(None, lambda group, bucket: DDP_HOOKS[wire](group, bucket))  # noqa: PLW0108
        self.last: StepReport | None = None
        self._members = tuple(range(dist.get_world_size()))
        self._stats = Stats()
        self._last_gradient_s = 0.0
        for param in model.parameters():
            on_gradient(param, self._note_gradient)
        optimizer.register_step_pre_hook(self._note_step)

    @property
    def step(self) -> int:
        """Return the number of updates."""
        return self._stats.steps

    def _note_gradient(self, _: Tensor) -> None:
        self._last_gradient_s = perf_counter()

    def _note_step(self, *_: object) -> None:
        self.last = StepReport(self.step, self._members, perf_counter() - self._last_gradient_s, ())
        self._stats = self._stats.plus(self.last)

    def stats(self) -> Stats:
        """Return the totals; DDP does not tell how long it communicates, nor what it sends."""
        return self._stats

    def disagreement(self) -> float:
        """Return 0: DDP keeps all replicas equal."""
        return 0.0

    def consolidate(self) -> None:
        """Do nothing: all replicas are equal."""


class _Stretch(NamedTuple):
    """The steps that one process took part in; a replacement starts in the middle."""

    begin: int
    end: int
    seconds: float


def work(job: Job, data: tuple[Images, Images], progress: Progress) -> Result:
    """Train as one rank of the world that this process was launched into; collective."""
    torch.set_num_threads(1)
    joined = init(job.timeout_s, start_timeout_s=job.start_timeout_s)
    with joined as world, ddp_group(world) if job.algorithm == DDP else nullcontext():
        model, recipe = lenet(job.seed), RECIPES[job.recipe]
        control = job.batches((world.rank, world.size))
        optimizer = recipe.optimizer(model, job.lr)
        rate = recipe.rate(optimizer, control, job.epochs)
        replica = _replica(job, world, model, optimizer, rate)
        feed, injected, end = dataset.Feed(data[0], control), _injection(job, world), job.steps(world.size)
        begin, begin_s, wants_report = replica.step, perf_counter(), job.report is not None
        with recording_timeline(world, job.trace), recording_history(world, wanted=wants_report) as recorder:
            while (step := replica.step) < end:
                batch = feed.batch(step)
                injected.begin_step()
                outputs, loss = _step(world, replica, optimizer, batch, injected, recipe.smoothing)
                rate.step()
                progress(replica.step, loss, replica.stats())
                if recorder is not None:
                    recorder.record_iteration(step, loss, outputs, batch.digits, replica.last)
            stretch = _Stretch(begin, end, perf_counter() - begin_s)
        result = _result(job, data[1], world, replica, model, stretch)
        if recorder is None:
            return result
        recorder.record_averaged_step(replica.last)  # gossip reports its last step late
        return replace(result, record=gather_record(world, recorder))


def _injection(job: Job, world: World) -> Injection:
    """Return the faults of this rank; a process that replaces a killed one is not killed again."""
    is_replacement = world.config is not None
    faults = [fault for fault in job.inject if not (is_replacement and fault.kind == "kill")]
    return Injection(faults, job.seed, world.rank)


def _step(
    world: World, replica: Replica | DdpReplica, optimizer: Optimizer, batch: Images, injected: Injection,
    smoothing: float,
) -> tuple[Tensor, float]:  # fmt: skip
    """Make one step; return the outputs before the update, and the loss."""
    optimizer.zero_grad()
    with within_range(world.recorder, "forward"):
        outputs = replica.model(batch.pixels)
        loss = cross_entropy(outputs, batch.digits, label_smoothing=smoothing)
    injected.compute()
    with within_range(world.recorder, "backward"):
        torch.autograd.backward(loss)
    with within_range(world.recorder, "optimizer"):
        optimizer.step()
    return outputs, loss.item()


@contextmanager
def ddp_group(world: World) -> Iterator[None]:
    """Make torch's default group from the ranks and the store of `world`."""
    store, limit = PrefixStore(DDP, world.store), timedelta(seconds=world.timeout_s)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _replica(
    job: Job, world: World, model: nn.Module, optimizer: Optimizer, rate: LRScheduler | Rate
) -> Replica | DdpReplica:
    wire = WIRES[job.wire]
    if job.algorithm == DDP:
        return DdpReplica(model, optimizer, job.bucket_cap_mb, wire)
    algorithm = BackupWorkers(job.backups) if job.algorithm == BACKUP else by_name(job.algorithm)
    return attach(model, optimizer, algorithm, world=world, wire=wire, bucket_cap_mb=job.bucket_cap_mb, also=[rate])


def _result(
    job: Job, test: Images, world: World, replica: Replica | DdpReplica, model: nn.Module, stretch: _Stretch
) -> Result:
    steps, disagreement = max(stretch.end - stretch.begin, 1), replica.disagreement()
    replica.consolidate()
    stats, mark, knows = replica.stats(), fingerprint(model), job.algorithm != DDP
    told = _gathered(world, f"{stats.steps - stats.counted} {stats.late_s}")
    with torch.no_grad():
        right = model(test.pixels).argmax(dim=1) == test.digits
    return Result(
        algorithm=job.algorithm,
        recipe=job.recipe,
        workers=world.size,
        wire=job.wire,
        epochs=job.epochs,
        steps=stretch.end,
        test_accuracy=float(right.float().mean()),
        disagreement=disagreement,
        replicas_equal=world.all_equal("trained model", mark),
        images_per_second=_images(job, world, stretch) / stretch.seconds,
        step_seconds=stretch.seconds / steps,
        exposed_comm_seconds=stats.exposed_s / steps,
        comm_seconds=stats.comm_s / steps if knows else None,
        bytes_sent_per_step=stats.nbytes_sent // steps if knows else None,
        fingerprint=mark,
        lost=tuple(loss.rank for loss in world.lost),
        late={rank: int(said.split()[0]) for rank, said in told.items()},
        saved_seconds=sum(float(said.split()[1]) for said in told.values()),
    )


def _images(job: Job, world: World, stretch: _Stretch) -> int:
    """Return how many images all ranks have used during `stretch`."""
    control = job.batches((world.rank, world.size))

    def of_a_rank(begin: int) -> int:
        return dataset.images_after(control, stretch.end) - dataset.images_after(control, begin)

    if job.algorithm == BACKUP:
        return (world.size - job.backups) * of_a_rank(stretch.begin)
    unused = sum(of_a_rank(max(loss.step, stretch.begin)) for loss in world.lost)
    return world.size * of_a_rank(stretch.begin) - unused


def _gathered(world: World, text: str) -> dict[int, str]:
    """Return the text of every surviving rank; collective."""
    prefix = PrefixStore("told", world.store)
    prefix.set(str(world.rank), text)
    world.agree("told")
    return {rank: prefix.get(str(rank)).decode() for rank in world.members}
