# SPDX-License-Identifier: Apache-2.0
"""``--curve FILE``: which runs have a curve, and what the file says about the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from curve_recorder import CurveRecorder
from job import BACKUP, FP32, GOSSIP, LOCAL, Job
from torch import nn

import commrt
from commrt.errors import UsageError
from commrt.tools.pictures.files import require_writable, write

__all__ = ["TrainingCurve", "has_statistics", "require_curve", "settings_of", "training_of"]

OPTION = "--curve"
SYNCHRONOUS = "synchronous"


def require_curve(job: Job) -> None:
    """Raise `UsageError` for a run that has no curve, and for a file that cannot be written."""
    if job.curve is None:
        return
    if job.algorithm == BACKUP:
        raise UsageError(f"{OPTION} with backup: gradients that come late do not count; take another algorithm")
    if job.recipe.growth != 1:
        raise UsageError(f"{OPTION} with --recipe {job.recipe_name}: its batches grow, and a curve has one batch size")
    require_writable(OPTION, job.curve, "curve.jsonl")


def training_of(job: Job) -> str:
    """Return how the ranks train, as a curve says it: all all-reduces train alike."""
    return job.algorithm if job.algorithm in {GOSSIP, LOCAL} else SYNCHRONOUS


def settings_of(job: Job) -> Mapping[str, int | float | str]:
    """Return what else decides how training converges; the learning rate may depend on the ranks."""
    wire: dict[str, int | float | str] = {} if job.wire == FP32 else {"wire": job.wire}
    if job.algorithm != LOCAL:
        return wire
    chosen = job.local.algorithm(job.wire)
    delay = {"delay": chosen.delay} if chosen.delay else {}
    fragments = {"fragments": chosen.fragments} if chosen.fragments > 1 else {}
    outer = {"outer": job.local.outer} if job.local.outer is not None else {}
    return {"period": chosen.period, **delay, **fragments, **outer, **wire}


def has_statistics(job: Job) -> bool:
    """Return True if each step averages gradients; codes add noise of their own to the average."""
    return training_of(job) == SYNCHRONOUS and not job.has_codes


class TrainingCurve:
    """The curve of a run on one rank; without --curve it does nothing. Make it before `attach`."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job = job
        self._recorder = None if job.curve is None else CurveRecorder(model if has_statistics(job) else None)

    def record(self, loss: float) -> None:
        """Record the loss of a step."""
        if self._recorder is not None:
            self._recorder.record(loss)

    def save(self, world: commrt.World) -> None:
        """Let the first rank that is left write the file; collective. Raises `CommrtError` if the disk refuses."""
        path, job = self._job.curve, self._job
        if self._recorder is None or path is None:
            return
        batch, recipe = job.batch_size // world.size * world.size, {"lr": job.lr, "epochs": job.epochs}
        text = self._recorder.lines(world, training_of(job), batch, settings_of(job), job.seed, recipe)
        if text is not None:
            write(OPTION, path, lambda: Path(path).write_text(text, encoding="utf-8"))
