# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and what is refused before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import recipes
import torch
from dataset import TRAIN_IMAGES
from inject_faults import Fault, check
from recipes import RECIPES, Recipe

import commrt
from commrt.algorithms import catalogue
from commrt.data.large_batch import BatchSizeControl
from commrt.errors import UsageError
from commrt.threads.deadline import Timeouts, require_deadlines
from commrt.tools.pictures.files import require_writable
from commrt.tools.planning.wires import require_carried

__all__ = [
    "ALGORITHMS",
    "BACKUP",
    "DDP",
    "DIRECT",
    "FP32",
    "GOSSIP",
    "LOCAL",
    "WIRES",
    "Job",
    "LocalSettings",
]

GOSSIP = "gossip"
LOCAL = "local"
BACKUP = "backup"
DIRECT = "direct"
DDP = "ddp"
ALGORITHMS = (*catalogue.ALGORITHMS, *catalogue.POLICIES)
FP32 = "fp32"
QUANTIZERS = {
    "int8": commrt.Int8(),
    "int4": commrt.Int4(),
    "int2": commrt.Int2(),
    "float8": commrt.Float8(),
}
WIRES: Mapping[str, torch.dtype | commrt.quantization.Quantizer | None] = {
    FP32: None, "bf16": torch.bfloat16, "fp16": torch.float16, **QUANTIZERS,
}  # fmt: skip


class LocalSettings(NamedTuple):
    """The options about local SGD; None if an option was not given."""

    period: int | None = None
    delay: int | None = None
    fragments: int | None = None
    outer: str | None = None
    """Rate and momentum of the outer optimizer."""

    def given(self) -> dict[str, object]:
        """Return the options by name."""
        return {f"--{name}": value for name, value in self._asdict().items()}

    def algorithm(self, wire: str = FP32) -> commrt.LocalSGD:
        """Return local SGD with these options; raises `UsageError`. Codes travel by `Direct`."""
        values = self._asdict() | {"outer": None if self.outer is None else _outer(self.outer)}
        values |= {"inner": commrt.Direct()} if wire in QUANTIZERS else {}
        return commrt.LocalSGD(
            **{name: value for name, value in values.items() if value is not None}
        )


def _outer(text: str) -> commrt.local_sgd.Nesterov:
    try:
        rate, momentum = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"--outer {text}: write RATE,MOMENTUM, such as 0.7,0.5") from None
    return commrt.local_sgd.Nesterov(rate, momentum)


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
    start_timeout_s: float | None
    trace: str | None = None
    """File for a timeline of all ranks."""
    inject: tuple[Fault, ...] = ()
    backups: int = 1
    """For algorithm backup: how many workers a step does not wait for."""
    recipe_name: str = recipes.PLAIN
    """A name in `RECIPES`."""
    local: LocalSettings = LocalSettings()  # noqa: RUF009  # a tuple
    """For algorithm local."""

    def check(self, workers: int) -> None:
        """Raise `UsageError` for settings that cannot work, before any process starts."""
        if workers < 1:
            raise UsageError(f"--workers {workers}: give at least 1")
        if self.algorithm not in (offered := (*ALGORITHMS, DDP)):
            names = ", ".join(sorted(offered))
            raise UsageError(f"no algorithm is called {self.algorithm!r}: choose one of {names}")
        if not workers <= self.batch_size <= TRAIN_IMAGES:
            raise UsageError(
                f"--batch-size {self.batch_size}: each of {workers} workers needs an image, and"
                f" there are {TRAIN_IMAGES} to train on"
            )
        for option, value in (("--lr", self.lr), ("--bucket-cap-mb", self.bucket_cap_mb)):
            if not 0 <= value < inf:
                raise UsageError(f"{option} {value:g}: give a finite number, 0 or more")
        require_deadlines(
            **{"--timeout-s": self.timeout_s, "--start-timeout-s": self.start_timeout_s}
        )
        Timeouts.of(self.timeout_s, self.start_timeout_s)
        recipes.require_fit(self.recipe_name, self.batch_size, self.epochs)
        if self.algorithm == BACKUP:
            commrt.BackupWorkers(self.backups).needed(workers)
        self._check_wire(workers)
        for fault in self.inject:
            check(fault, workers, self.steps(workers))
        if self.trace is not None:
            require_writable("--trace", self.trace, "trace.json")

    def _check_wire(self, workers: int) -> None:
        if self.algorithm != DDP:
            require_carried(self.chosen(), workers, self.wire)
        elif self.wire in QUANTIZERS:
            raise UsageError(
                f"--wire {self.wire} is not for ddp: take fp32, bf16 or fp16, or --algorithm direct"
            )

    @property
    def has_codes(self) -> bool:
        """Return True if gradients travel as codes of few bits, which do not add."""
        return self.wire in QUANTIZERS

    @property
    def recipe(self) -> Recipe:
        """Return how to train."""
        return RECIPES[self.recipe_name]

    def chosen(self) -> commrt.Algorithm:
        """Return the algorithm. Backup workers and local SGD sum codes by `Direct`."""
        if self.algorithm == LOCAL:
            return self.local.algorithm(self.wire)
        if self.algorithm != BACKUP:
            return catalogue.by_name(self.algorithm)
        return commrt.BackupWorkers(
            self.backups, commrt.Direct() if self.has_codes else commrt.Torus2D()
        )

    def compared(self, algorithm: str) -> Job:
        """Return this job with another algorithm; DDP has no codes,
        and takes fp32 instead of them.
        """
        wire = FP32 if algorithm == DDP and self.has_codes else self.wire
        return replace(self, algorithm=algorithm, trace=None, wire=wire)

    def unwise(self, workers: int) -> list[str]:
        """Return what speaks against the settings, in sentences."""
        return (
            self.local.algorithm(self.wire).unwise(self.steps(workers))
            if self.algorithm == LOCAL
            else []
        )

    def steps(self, workers: int) -> int:
        """Return the number of steps of the run."""
        return self.batches((0, workers)).updates_after(self.epochs)

    def batches(self, place: tuple[int, int]) -> BatchSizeControl:
        """Return the batches of `place` = (rank, workers)."""
        return recipes.batches(
            self.recipe, place, self.batch_size // place[1], self.epochs, self.seed
        )

    def outlives(self, workers: int) -> int:
        """Return how many of `workers` workers may die without ending the run."""
        return {GOSSIP: workers - 1, LOCAL: workers - 1, BACKUP: self.backups}.get(
            self.algorithm, 0
        )
