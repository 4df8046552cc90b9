# SPDX-License-Identifier: Apache-2.0
"""One process of a run with failures: trains the CNN of ``examples/mnist``, and records each update.

What it records survives SIGKILL: a line of a file for each event, and a row of a file in shared memory, through which
the parent sees its progress and makes it slow, or lets it fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import commrt
import commrt.c10d
from commrt.store.launcher import LOOPBACK

sys.path.append(str(Path(__file__).parents[1] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "mnist"))
from dataset import TRAIN_IMAGES, Images, lenet, load

BATCH = 4
"""Images of each rank in a step."""
LR, MOMENTUM = 0.02, 0.9
DDP_TIMEOUT_S = 30.0
"""Longer than for the others: a start on a busy machine must not end in a timeout. A death is noticed before it."""
PID, STEP, COMMAND, SLOW_UNTIL, DONE = range(5)
NOTHING, RAISE, EXIT, DIE_SENDING = range(4)
EXIT_CODES = {"failed": 1, "exit": 3, "QuorumLost": 20}
CHECKPOINT, OVER = "checkpoint.pt", "over"
"""Files of a run: the latest checkpoint, and one that says that its time is over."""
WAYS: dict[str, Callable[[], Any]] = {
    "backup1": lambda: commrt.BackupWorkers(backups=1),
    "backup2": lambda: commrt.BackupWorkers(backups=2),
    "gossip": commrt.Gossip,
    "local": lambda: commrt.LocalSGD(period=4, delay=1),
}


RECONFIGURED = {"ddp-reconfigure": "commrt", "ddp-reconfigure-gloo": "gloo"}
"""The backend of torch.distributed of each contender whose ranks come and go in one group."""
RESTARTED = {"ddp": "gloo", "ddp-commrt": "commrt"}
"""The same of those that torchrun's agent starts again."""

TORCHFT = {"torchft": "torchft-nightly", "torchft-stable": "torchft"}
"""The package of each contender of torchft. Both have one name in Python, so one of them runs at a time."""


@dataclass(frozen=True)
class Job:
    """One run of one contender."""

    contender: str
    folder: str
    ranks: int
    steps: int
    compute_s: float
    """A rank sleeps so long in each step, on average: a GPU that is busy."""
    seed: int
    checkpoint_every: int
    timeout_s: float = 5.0
    transport: str = ""
    """Of commrt; by default the one that it chooses."""


class InjectedError(RuntimeError):
    """A failure that was made on purpose."""


def board(folder: str | Path, ranks: int) -> Any:
    """Return the rows of all ranks, which processes share: process, step, what to do, slow until, whether done."""
    path = Path(folder) / "board"
    if not path.exists():
        np.tile([0.0, -1.0, 0.0, 0.0, 0.0], (ranks, 1)).tofile(path)
    return np.memmap(path, dtype=np.float64, mode="r+", shape=(ranks, 5))


def prepare_images(folder: Path) -> None:
    """Write the images in a form that processes read in milliseconds."""
    train, test = load()
    torch.save([train.pixels.double(), train.digits, test.pixels.double(), test.digits], folder / "images.pt")


def images(folder: str | Path) -> tuple[Images, Images]:
    """Return the images to train on and to test with."""
    pixels, digits, *test = torch.load(Path(folder) / "images.pt", mmap=True)
    return Images(pixels, digits), Images(*test)


def fresh(seed: int) -> tuple[nn.Module, SGD]:
    """Return the model before its first step, in float64, and its optimizer."""
    model = lenet(seed).double()
    return model, SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def batch_of(data: Images, seed: int, step: int, units: Iterable[int], ranks: int) -> tuple[Tensor, Tensor]:
    """Return the images of a step for some ranks. A step and a rank have the same images in all contenders."""
    per_epoch = TRAIN_IMAGES // (BATCH * ranks)
    order = torch.from_numpy(np.random.default_rng([seed, step // per_epoch]).permutation(TRAIN_IMAGES))
    first = step % per_epoch * BATCH * ranks
    mine = torch.cat([order[first + BATCH * unit : first + BATCH * (unit + 1)] for unit in units])
    return data.pixels[mine], data.digits[mine]


def save_state(path: Path, model: nn.Module, optimizer: SGD, step: int) -> None:
    """Write a checkpoint; whoever reads finds a whole one."""
    part = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def load_state(path: Path, model: nn.Module, optimizer: SGD) -> int:
    """Load a checkpoint, if there is one; return its number of updates."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


class Reporter:
    """What one process records, and the failures that it makes when the parent asks for them."""

    def __init__(self, job: Job, rank: int, attempt: int) -> None:
        self.job, self.rank, self.attempt = job, rank, attempt
        self.folder, self._row = Path(job.folder), board(job.folder, job.ranks)[rank]
        self._row[:] = os.getpid(), -1, NOTHING, 0, self._row[DONE]
        self._file = os.open(self.folder / f"events-{rank}-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._slept_s = 0.0
        self.data = images(job.folder)[0]
        self.note("start")

    def note(self, kind: str, **more: Any) -> None:
        """Write one event."""
        event = {"kind": kind, "rank": self.rank, "pid": os.getpid(), "attempt": self.attempt}
        event |= {"at_s": monotonic(), **more}
        os.write(self._file, (json.dumps(event) + "\n").encode())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Begin a step; return this rank's images."""
        if not self._slept_s:
            self.note("first step", step=step)
        self._row[STEP] = step
        return batch_of(self.data, self.job.seed, step, [self.rank], self.job.ranks)

    def compute(self, step: int) -> None:
        """Sleep as long as a step computes; three times as long in a slow process. Fail if the parent asks for it."""
        self._slept_s = left_s = Random(f"{self.rank} {step}").uniform(0.8, 1.2) * self.job.compute_s
        while left_s > 0:
            part_s = min(left_s, 0.01)
            sleep(3 * part_s if monotonic() < self._row[SLOW_UNTIL] else part_s)
            left_s -= part_s
            if self._row[COMMAND] == RAISE:
                raise InjectedError("a failure made on purpose")
            if self._row[COMMAND] == EXIT:
                os._exit(EXIT_CODES["exit"])

    def dying_before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`; in place of it this process kills itself, if the parent asks for it."""

        def dying(*given: Any) -> Any:
            if self._row[COMMAND] == DIE_SENDING:
                self.note("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given)

        return dying

    def counted(self, step: int, members: Iterable[int]) -> None:
        """Record that an update was made from the gradients of some ranks."""
        self.note("update", step=step, members=[int(member) for member in members])

    def done(self) -> None:
        """Record that this process has the final model."""
        self.note("done")
        self._row[DONE] = 1

    def save_final(self, model: nn.Module) -> None:
        """Save the final weights."""
        path = self.folder / f"final-{self.rank}.pt"
        torch.save(model.state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        self.note("end")


def train_ddp(reporter: Reporter) -> None:
    """Train with DDP, and write a checkpoint every few steps."""
    job, path = reporter.job, reporter.folder / CHECKPOINT
    dist.init_process_group(RESTARTED[job.contender], timeout=timedelta(seconds=DDP_TIMEOUT_S))
    model, optimizer = fresh(job.seed)
    step = load_state(path, model, optimizer)
    replicated = DistributedDataParallel(model)
    reporter.note("ready", step=step)
    while step < job.steps:
        _step(reporter, replicated, optimizer, step)
        reporter.counted(step, range(job.ranks))
        step += 1
        if job.checkpoint_every and step % job.checkpoint_every == 0 and reporter.rank == 0:
            save_state(path, model, optimizer, step)
    reporter.done()
    reporter.save_final(model)
    dist.destroy_process_group()


def train_reconfigured(reporter: Reporter) -> None:
    """Train with DDP as ``examples/ddp_survives.py`` does: a turn for each death, and for each process that comes."""
    from ddp_survives import take_moments  # noqa: PLC0415  # heavy
    from meeting import Meeting  # noqa: PLC0415

    job, limit = reporter.job, timedelta(seconds=DDP_TIMEOUT_S)
    dist.init_process_group(RECONFIGURED[job.contender], timeout=limit, enable_reconfigure=True)
    meeting = Meeting(reporter.rank, job.ranks, job.timeout_s)
    model, optimizer = fresh(job.seed)
    step = 0
    while _leave_gloo(meeting) and meeting.hold(step):
        reporter.attempt = meeting.turn
        reporter.note("formed")
        members = [member.number for member in meeting.members]
        try:
            replicated = DistributedDataParallel(model)
            take_moments(model, optimizer)
            step = meeting.members[0].steps
            meeting.loaded()
            reporter.note("ready", step=step)
            while step < job.steps and not meeting.is_called():
                _step(reporter, replicated, optimizer, step)
                reporter.counted(step, members)
                step += 1
            if step == job.steps:
                reporter.done()
                dist.barrier()
                meeting.end()
                break
        except InjectedError:
            raise
        except RuntimeError as error:  # of a collective: a rank has died, or called the others
            reporter.note("leaves", text=f"{type(error).__name__}: {error}")
    if step == job.steps:
        reporter.save_final(model)
    dist.destroy_process_group()


def _leave_gloo(meeting: Any) -> bool:
    """Break Gloo's connections, in a group of one: its `abort` lets those who wait for this rank wait on."""
    if dist.get_backend() == "gloo" and meeting.turn >= 0:
        alone = (os.getpid() << 20) + meeting.turn
        dist._reconfigure(alone, [dist._get_reconfigure_handle()]).wait()  # torch has no other names yet
    return True


def train_commrt(reporter: Reporter) -> None:
    """Train with one of commrt's algorithms that go on without a rank."""
    job, folder = reporter.job, reporter.folder
    with commrt.init(job.timeout_s, start_timeout_s=30.0) as world:
        model, optimizer = fresh(job.seed)
        base = load_state(folder / f"resume-{reporter.attempt}.pt", model, optimizer)
        replica = commrt.attach(model, optimizer, WAYS[job.contender]())
        last = folder / f"last-{reporter.attempt}-{reporter.rank}.pt"
        replica.before_giving_up(lambda: save_state(last, model, optimizer, base + replica.step))
        reporter.note("ready", step=base + replica.step)
        _watch(reporter, world, replica)
        if job.contender.startswith("backup"):
            _train_with_backups(reporter, replica, model, optimizer, base)
        else:
            _train_apart(reporter, replica, model, optimizer, base, world)
        reporter.save_final(model)


def _watch(reporter: Reporter, world: commrt.World, replica: commrt.Replica) -> None:
    """Record how this rank comes to new generations. Die before a bucket is sent, if the parent asks for it."""
    membership, engine = world.membership, getattr(replica, "_engine", None)

    def noting(call: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            reporter.note(before)
            try:
                return call(*given)
            finally:
                reporter.note(after)

        return noted

    membership._next_generation = noting(membership._next_generation, "leaves", "formed")  # type: ignore[attr-defined]
    membership._connect = noting(membership._connect, "connects", "connected")  # type: ignore[attr-defined]
    if engine is not None:
        engine.reduce_now = reporter.dying_before(engine.reduce_now)


def _train_with_backups(
    reporter: Reporter, replica: commrt.Replica, model: nn.Module, optimizer: SGD, base: int
) -> None:
    replica.drain()
    while (step := base + replica.step) < reporter.job.steps:
        _step(reporter, model, optimizer, step)
        if replica.last is not None and replica.last.counted:
            reporter.counted(base + replica.last.step, replica.last.members)
        replica.drain()
    reporter.done()
    if not replica.replicas_equal():
        reporter.note("wrong", text="the replicas differ")


def _train_apart(
    reporter: Reporter, replica: commrt.Replica, model: nn.Module, optimizer: SGD, base: int, world: commrt.World
) -> None:
    every = reporter.job.checkpoint_every
    for step in range(base, reporter.job.steps):
        _step(reporter, model, optimizer, step)
        reporter.counted(step, [reporter.rank])
        if every and (step + 1) % every == 0 and reporter.rank == world.members[0]:
            save_state(reporter.folder / CHECKPOINT, model, optimizer, step + 1)
    replica.consolidate()
    reporter.done()


def train_torchft(reporter: Reporter) -> None:
    """Train as one replica of torchft, which copies the weights of another to join, to the last step."""
    from torchft import DistributedDataParallel, Manager, Optimizer  # noqa: PLC0415  # not on all platforms
    from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415

    job, limit = reporter.job, timedelta(seconds=reporter.job.timeout_s)
    model, optimizer = fresh(job.seed)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(limit),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica{reporter.rank}",
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        timeout=limit,
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=limit,
        hostname=LOOPBACK,
        init_sync=False,
    )
    steps, is_stable = Optimizer(manager, optimizer), job.contender == "torchft-stable"
    replicated = model if is_stable else DistributedDataParallel(manager, model)
    _await_all(reporter)
    reporter.note("ready", step=manager.current_step())
    while (step := manager.current_step()) < job.steps:
        steps.zero_grad()
        x, y = reporter.batch(step)
        loss = cross_entropy(replicated(x), y)
        reporter.compute(step)
        loss.backward()
        if is_stable:  # its DistributedDataParallel ends all replicas if one dies: "assert fut._fut"
            _average(manager, model)
        takes_part = manager.is_participating()
        steps.step()
        if manager.current_step() > step and takes_part:
            reporter.counted(step, [reporter.rank])
    reporter.done()
    reporter.save_final(model)
    manager.shutdown(wait=False)


def _average(manager: Any, model: nn.Module) -> None:
    """Average the gradients of all replicas, in one buffer, as DDP has them in one bucket."""
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(buffer).wait()
    mean = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, mean, strict=True):
        gradient.copy_(part.view_as(gradient))


def _await_all(reporter: Reporter) -> None:
    """Wait until all replicas of the start are there; otherwise the first ones begin without the others."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("replicas", 1)
    while store.add("replicas", 0) < reporter.job.ranks:
        sleep(0.01)


def _step(reporter: Reporter, model: nn.Module, optimizer: SGD, step: int) -> None:
    x, y = reporter.batch(step)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    reporter.compute(step)
    loss.backward()
    optimizer.step()


def run_rank(job: Job, attempt: int = 0) -> None:
    """Be one process of a run; ends the process with an exit code that says why."""
    torch.set_num_threads(1)
    if job.transport:
        os.environ["COMMRT_TRANSPORT"] = job.transport
    output = os.open(Path(job.folder) / f"output-{os.environ['RANK']}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    by_torchrun = "TORCHELASTIC_RESTART_COUNT" in os.environ
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if by_torchrun else attempt
    if (Path(job.folder) / OVER).exists():
        return  # torchrun's agent ends when all processes end well
    reporter = Reporter(job, int(os.environ["RANK"]), attempt)
    try:
        _train(reporter)
    except Exception as error:
        reporter.note("error", text=f"{type(error).__name__}: {error}")
        if by_torchrun:
            raise  # its agent reports the traceback
        sys.exit(EXIT_CODES.get(type(error).__name__, EXIT_CODES["failed"]))


def _train(reporter: Reporter) -> None:
    if reporter.job.contender in TORCHFT:
        train_torchft(reporter)
    elif reporter.job.contender in RECONFIGURED:
        train_reconfigured(reporter)
    elif reporter.job.contender in WAYS:
        train_commrt(reporter)
    else:
        train_ddp(reporter)
