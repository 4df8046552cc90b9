# SPDX-License-Identifier: Apache-2.0
"""One training run of ``commrt train``: its settings, what each worker does, and the result."""

from __future__ import annotations

import json
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
from commrt.algorithms.catalogue import ALGORITHMS, BACKUP, GOSSIP, LOCAL, by_name
from commrt.algorithms.direct import Direct
from commrt.errors import UsageError
from commrt.pricing.wires import QUANTIZERS, require_carried
from commrt.quantizer import Quantizer
from commrt.runtime.init import init
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.schedule import Algorithm
from commrt.store.launcher import require_deadlines
from commrt.tools.commands import dataset
from commrt.tools.commands.dataset import RECIPES, TRAIN_IMAGES, Images, lenet
from commrt.tools.commands.inject_faults import Fault, Injection, check
from commrt.tools.commands.options import LocalOptions
from commrt.tools.commands.training_curve import RecordedRun, recording_curve
from commrt.tools.pictures.files import require_writable
from commrt.tools.pictures.history import HistoryRecorder, gather_record, recording_timeline
from commrt.tools.pictures.tables import Result
from commrt.training.attach import attach
from commrt.training.hooks import on_gradient
from commrt.training.large_batch import BatchSizeControl, Rate
from commrt.training.model_state import fingerprint
from commrt.training.replica import Replica, Stats, StepReport

__all__ = ["DDP", "DdpReplica", "Job", "Progress", "ddp_group", "work"]

DDP = "ddp"
WIRES: dict[str, torch.dtype | Quantizer | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
} | QUANTIZERS
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
    local: LocalOptions = LocalOptions()  # noqa: RUF009  # a tuple
    """For algorithm local."""
    curve: str | None = None
    """File for the loss of each step."""

    def check(self, workers: int) -> None:
        """Raise `UsageError` for settings that cannot work, before any process starts."""
        if workers < 1:
            raise UsageError(f"--workers {workers}: give at least 1")
        if self.algorithm not in (offered := (*ALGORITHMS, GOSSIP, LOCAL, BACKUP, DDP)):
            names = ", ".join(sorted(offered))
            raise UsageError(f"no algorithm is called {self.algorithm!r}: choose one of {names}")
        if not workers <= self.batch_size <= TRAIN_IMAGES:
            raise UsageError(
                f"--batch-size {self.batch_size}: each of {workers} workers needs an image, and there are "
                f"{TRAIN_IMAGES} to train on"
            )
        for option, value in (("--lr", self.lr), ("--bucket-cap-mb", self.bucket_cap_mb)):
            if not 0 <= value < inf:
                raise UsageError(f"{option} {value:g}: give a finite number, 0 or more")
        require_deadlines(**{"--timeout-s": self.timeout_s, "--start-timeout-s": self.start_timeout_s})
        dataset.require_fit(self.recipe, self.batch_size, self.epochs)
        if self.algorithm == BACKUP:
            BackupWorkers(self.backups).needed(workers)
        self._check_wire(workers)
        for fault in self.inject:
            check(fault, workers, self.steps(workers))
        if self.trace is not None:
            require_writable("--trace", self.trace, "trace.json")
        if recorded := self.recorded(workers):
            recorded.check()

    def _check_wire(self, workers: int) -> None:
        if self.algorithm != DDP:
            require_carried(self.chosen(), workers, self.wire)
        elif self.wire in QUANTIZERS:
            raise UsageError(f"--wire {self.wire} is not for ddp: take fp32, bf16 or fp16, or --algorithm direct")

    def chosen(self) -> Algorithm:
        """Return the algorithm. Backup workers and local SGD sum codes by `Direct`."""
        if self.algorithm == LOCAL:
            return self.local.algorithm(self.wire)
        if self.algorithm != BACKUP:
            return by_name(self.algorithm)
        return BackupWorkers(self.backups, Direct()) if self.wire in QUANTIZERS else BackupWorkers(self.backups)

    def unwise(self, workers: int) -> list[str]:
        """Return what speaks against the settings, in sentences."""
        return self.local.algorithm(self.wire).unwise(self.steps(workers)) if self.algorithm == LOCAL else []

    def recorded(self, workers: int) -> RecordedRun | None:
        """Return what is recorded; None without --curve."""
        if self.curve is None:
            return None
        batch = self.batch_size // workers * workers
        facts = self.algorithm, self.wire, self.recipe, self.local, batch, self.seed, self.lr, self.epochs
        return RecordedRun(self.curve, *facts)

    def steps(self, workers: int) -> int:
        """Return the number of steps of the run."""
        return self.batches((0, workers)).updates_after(self.epochs)

    def batches(self, place: tuple[int, int]) -> BatchSizeControl:
        """Return the batches of `place` = (rank, workers)."""
        return dataset.batches(RECIPES[self.recipe], place, self.batch_size // place[1], self.epochs, self.seed)

    def outlives(self, workers: int) -> int:
        """Return how many of `workers` workers may die without ending the run."""
        return {GOSSIP: workers - 1, LOCAL: workers - 1, BACKUP: self.backups}.get(self.algorithm, 0)


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


class _Part(NamedTuple):
    """The part of a run that one process took part in."""

    steps: int
    images: int
    """Of this rank, in gradients that counted."""
    seconds: float


def work(job: Job, data: tuple[Images, Images], progress: Progress) -> Result:
    """Train as one rank of the world that this process was launched into; collective."""
    torch.set_num_threads(1)
    model, recipe = lenet(job.seed), RECIPES[job.recipe]
    joined = init(job.timeout_s, start_timeout_s=job.start_timeout_s)
    with (
        joined as world,
        ddp_group(world) if job.algorithm == DDP else nullcontext(),
        recording_curve(world, model, job.recorded(world.size)) as record_loss,
    ):
        control = job.batches((world.rank, world.size))
        optimizer = recipe.optimizer(model, job.lr)
        rate = recipe.rate(optimizer, control, job.epochs)
        replica = _replica(job, world, model, optimizer, rate)
        feed, injected = dataset.Feed(data[0], control), Injection(job.inject, job.seed, world.rank)
        begin, end, begin_s, images = replica.step, job.steps(world.size), perf_counter(), 0
        with recording_timeline(world, job.trace):
            recorder = HistoryRecorder(world) if job.report is not None else None
            while (step := replica.step) < end:
                batch = feed.batch(step)
                injected.begin_step()
                outputs, loss = _step(world, replica, optimizer, batch, injected, recipe.smoothing)
                record_loss(loss)
                rate.step()
                progress(replica.step, loss, replica.stats())
                images += len(batch.digits) * (replica.last is None or replica.last.counted)
                if recorder is not None:
                    recorder.record_iteration(step, loss, outputs, batch.digits, replica.last)
            part = _Part(end - begin, images, perf_counter() - begin_s)
        result = _result(job, data[1], world, replica, model, part)
        if recorder is None:
            return result
        recorder.record_averaged_step(replica.last)  # gossip reports its last step late
        return replace(result, record=gather_record(world, recorder))


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
        return DdpReplica(model, optimizer, job.bucket_cap_mb, wire if isinstance(wire, torch.dtype) else None)
    return attach(model, optimizer, job.chosen(), world=world, wire=wire, bucket_cap_mb=job.bucket_cap_mb, also=[rate])


def _result(
    job: Job, test: Images, world: World, replica: Replica | DdpReplica, model: nn.Module, part: _Part
) -> Result:
    steps, disagreement = max(part.steps, 1), replica.disagreement()
    replica.consolidate()
    stats, mark, knows = replica.stats(), fingerprint(model), job.algorithm != DDP
    texts = _gathered(world, json.dumps([stats.steps - stats.counted, stats.late_s, part.images]))
    told = {rank: json.loads(text) for rank, text in texts.items()}
    with torch.no_grad():
        right = model(test.pixels).argmax(dim=1) == test.digits
    return Result(
        algorithm=job.algorithm,
        recipe=job.recipe,
        workers=world.size,
        wire=job.wire,
        epochs=job.epochs,
        steps=replica.step,
        test_accuracy=float(right.float().mean()),
        disagreement=disagreement,
        replicas_equal=world.all_equal("trained model", mark),
        images_per_second=sum(images for _, _, images in told.values()) / part.seconds,
        step_seconds=part.seconds / steps,
        exposed_comm_seconds=stats.exposed_s / steps,
        comm_seconds=stats.comm_s / steps if knows else None,
        bytes_sent_per_step=stats.nbytes_sent // steps if knows else None,
        fingerprint=mark,
        lost=tuple(loss.rank for loss in world.lost),
        late={rank: late for rank, (late, _, _) in told.items()},
        saved_seconds=sum(late_s for _, late_s, _ in told.values()),
    )


def _gathered(world: World, text: str) -> dict[int, str]:
    """Return the text of every surviving rank; collective."""
    prefix = PrefixStore("told", world.store)
    prefix.set(str(world.rank), text)
    world.agree("told")
    return {rank: prefix.get(str(rank)).decode() for rank in world.members}
