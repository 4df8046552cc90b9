# SPDX-License-Identifier: Apache-2.0
"""``commrt train --curve FILE``: which runs have a curve, and what is written about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from commrt.algorithms import catalogue
from commrt.errors import UsageError
from commrt.pricing.wires import QUANTIZERS
from commrt.runtime.world import World
from commrt.tools.commands.dataset import RECIPES
from commrt.tools.commands.options import LocalOptions
from commrt.tools.pictures.curve_recorder import CurveRecorder
from commrt.tools.pictures.files import require_writable
from commrt.tools.planning.curve import GOSSIP, LOCAL, SYNCHRONOUS

__all__ = ["RecordedRun", "recording_curve"]

OPTION = "--curve"


class RecordedRun(NamedTuple):
    """A run whose curve is written to `path`."""

    path: str
    algorithm: str
    wire: str
    recipe: str
    local: LocalOptions
    batch: int
    """Images of all workers in a step."""
    seed: int
    lr: float
    epochs: int

    def check(self) -> None:
        """Raise `UsageError` for a run that has no curve, and for a file that cannot be written."""
        if self.algorithm == catalogue.BACKUP:
            raise UsageError(f"{OPTION} with backup: gradients that come late do not count; take another algorithm")
        if RECIPES[self.recipe].growth != 1:
            raise UsageError(f"{OPTION} with --recipe {self.recipe}: its batches grow, and a curve has one batch size")
        require_writable(OPTION, self.path, "curve.jsonl")

    @property
    def training(self) -> str:
        """Return how the ranks train, as a curve says it."""
        return {catalogue.GOSSIP: GOSSIP, catalogue.LOCAL: LOCAL}.get(self.algorithm, SYNCHRONOUS)

    @property
    def settings(self) -> dict[str, int | float | str]:
        """Return what else decides how training converges; the learning rate may depend on the ranks."""
        wire: dict[str, int | float | str] = {} if self.wire == "fp32" else {"wire": self.wire}
        if self.training != LOCAL:
            return wire
        chosen = self.local.algorithm(self.wire)
        delay = {"delay": chosen.delay} if chosen.delay else {}
        fragments = {"fragments": chosen.fragments} if chosen.fragments > 1 else {}
        outer = {"outer": self.local.outer} if self.local.outer is not None else {}
        return {"period": chosen.period, **delay, **fragments, **outer, **wire}

    @property
    def has_statistics(self) -> bool:
        """Return True if each step averages gradients; codes add noise of their own to the average."""
        return self.training == SYNCHRONOUS and self.wire not in QUANTIZERS


@contextmanager
def recording_curve(world: World, model: nn.Module, run: RecordedRun | None) -> Iterator[Callable[[float], None]]:
    """Record the loss of each step that the body passes on; the first rank that is left writes the curve.

    Collective. Enter it before `attach`. Without a `run` it does nothing.
    """
    if run is None:
        yield lambda _: None
        return
    recorder = CurveRecorder(model if run.has_statistics else None)
    yield recorder.record
    curve = recorder.curve(world, run.training, run.batch, run.settings, run.seed)
    if curve is not None:
        replace(curve, recipe={"lr": run.lr, "epochs": run.epochs}).save(run.path)
