# SPDX-License-Identifier: Apache-2.0
"""Record curves of training on 1 to 16 ranks: ``python studies/time_to_loss/record_curves.py --out build/curves``.

`small_cnn` has the network, which takes 16 images per rank, with momentum 0.9. The rate is 0.005 per rank: it climbs
within 20 steps, and then stays. Each run is trained with the real runtime, one thread per rank. It
ends when the loss has long been below the targets that steps are counted to, 0.3 and 0.2. All 45 runs take 11 minutes
of processor time.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from curve import GOSSIP, LOCAL, SYNCHRONOUS, Curve
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt import World
from commrt.testing.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from curve_recorder import CurveRecorder
from mnist_images import BATCH, dealt  # it also puts the demo on the path
from small_cnn import MOMENTUM, network

__all__ = ["METHODS", "RATE", "STEPS", "WARMUP", "Method", "recorded"]

RATE, WARMUP = 0.005, 20
STEPS = {1: 1500, 2: 850, 4: 500, 8: 400, 16: 320}
"""Steps of a run, by ranks."""


@dataclass(frozen=True)
class Method:
    """A way to train."""

    training: str
    algorithm: commrt.Algorithm
    settings: dict[str, int | float | str] = field(default_factory=dict)


METHODS = {
    "synchronous": Method(SYNCHRONOUS, commrt.Torus2D()),
    "local": Method(LOCAL, commrt.LocalSGD(8), {"period": 8}),
    "gossip": Method(GOSSIP, commrt.Gossip()),
}


def recorded(method: Method, ranks: int, seed: int, steps: int) -> str:
    """Return what a run of `method` records, as the lines of a file."""
    first, parts = network(seed), list(dealt(seed, steps, ranks))

    def body(world: World) -> str | None:
        own = [(pixels[world.rank], digits[world.rank]) for pixels, digits in parts]
        recorder = _train_rank(world, copy.deepcopy(first), method, own)
        return recorder.lines(world, method.training, BATCH * ranks, method.settings, seed)

    return next(lines for lines in run_ranks(ranks, body) if lines is not None)


def _train_rank(world: World, model: nn.Module, method: Method, feed: Sequence[tuple[Tensor, Tensor]]) -> CurveRecorder:
    """Return what one rank has recorded."""
    recorder = CurveRecorder(model if method.training == SYNCHRONOUS else None)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    replica = commrt.attach(model, optimizer, method.algorithm, world=world)
    for step, (pixels, digits) in enumerate(feed):
        optimizer.param_groups[0]["lr"] = RATE * world.size * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels), digits)
        loss.backward()
        optimizer.step()
        recorder.record(loss.item())
    replica.drain()
    return recorder


def main() -> None:
    """Write a file per run, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--ranks", type=int, nargs="+", choices=STEPS, default=[*STEPS], help="numbers of ranks")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each setting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, ranks, seed in ((a, b, c) for b in options.ranks for a in METHODS for c in range(options.seeds)):
        begin_s = perf_counter()
        lines = recorded(METHODS[name], ranks, seed, STEPS[ranks])
        file = options.out / f"{name}-{ranks}-{seed}.jsonl"
        file.write_text(lines, encoding="utf-8")
        loss = Curve.parsed(lines).losses[-50:].mean()
        print(f"{file}: loss {loss:.3f} at the end, {perf_counter() - begin_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
