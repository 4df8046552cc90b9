# SPDX-License-Identifier: Apache-2.0
"""Measure what local SGD does to learning: ``python studies/local_sgd/local_accuracy.py``.

`small_cnn` has the network and the rate: 8 ranks, 480 steps. By default each pass deals all images anew to the ranks,
as torch's `DistributedSampler` does; with ``--feed kept`` each rank keeps its eighth of them.
Each setting is trained with the real runtime, one thread per rank, and ends with `Replica.consolidate`. The column
`simulation` is not measured by this script: an earlier simulation had these accuracies, whose feed is not recorded.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt import Direct, Gossip, World
from commrt.local_sgd import HeavyBall, LocalSGD, Mix, Nesterov
from commrt.quantization import Int4
from commrt.testing.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import FEEDS
from small_cnn import LR, MOMENTUM, RANKS, STEPS, Outcome, assessed, columns, network, rate, require_equal

__all__ = ["Case", "cases", "trained"]

SLOWER = Nesterov(0.7, 0.6)


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    algorithm: commrt.Algorithm
    simulated: str = "-"
    """Accuracy that the simulation had, in percent."""
    inner: Literal["sgd", "adamw"] = "sgd"
    rate: float = LR


def cases() -> list[Case]:
    """Return all settings."""
    return [
        Case("synchronous", commrt.Torus2D(), "96.7"),
        *(
            Case(f"H 4, d {d} correct", LocalSGD(4, d), seen)
            for d, seen in enumerate(["97.0", "97.1", "-", "96.8", "96.9"])
        ),
        *(
            Case(f"H 4, d 3 mix {x}", LocalSGD(4, 3, Mix(x)), y)
            for x, y in ((0, "95.3"), (0.25, "96.4"), (0.5, "96.5"))
        ),
        *(
            Case(f"H 16, d {d} correct", LocalSGD(16, d), seen)
            for d, seen in enumerate(["96.7", "96.5", "-", "-", "96.5"])
        ),
        *(Case(f"H 16, d 4 mix {x}", LocalSGD(16, 4, Mix(x)), y) for x, y in ((0, "96.4"), (0.5, "96.8"))),
        Case("H 16, d 15 correct", LocalSGD(16, 15), "96.1"),
        *(Case(f"H 16, d 15 mix {x}", LocalSGD(16, 15, Mix(x)), y) for x, y in ((0.5, "96.0"), (0, "80.4"))),
        Case("CoCoD, H 16", commrt.local_sgd.cocod(16)),
        *(Case(f"H 64, d {d} correct", LocalSGD(64, d), seen) for d, seen in ((0, "96.3"), (16, "95.6"))),
        Case("H 16, outer 0.7/0.9", LocalSGD(16, outer=Nesterov()), "91.5"),
        Case("H 16, outer 0.7/0.6", LocalSGD(16, outer=SLOWER), "96.8"),
        Case("AdamW 0.01, synchronous", commrt.Torus2D(), "96.9", "adamw", 0.01),
        Case("AdamW 0.02, synchronous", commrt.Torus2D(), "97.7", "adamw", 0.02),
        Case("AdamW 0.01, H 16", LocalSGD(16), "97.1", "adamw", 0.01),
        Case("DiLoCo: AdamW, 0.7/0.9", commrt.local_sgd.diloco(16), "96.0", "adamw", 0.01),
        Case("DiLoCo: AdamW, 0.7/0.6", commrt.local_sgd.diloco(16, SLOWER), "97.5", "adamw", 0.01),
        *streams(),
        Case("NoLoCo, H 16", commrt.local_sgd.noloco(16)),
        Case("NoLoCo, H 16, hypercube", LocalSGD(16, outer=HeavyBall(0.7, 0.3), inner=Gossip("hypercube"))),
    ]


def streams() -> list[Case]:
    """Return Streaming DiLoCo with four fragments; the simulation had floats of 4 bits where these are integers."""
    fragments = partial(LocalSGD, 16, 3, outer=SLOWER, fragments=4)
    narrow = fragments(Mix(0.5), inner=Direct(), wire=Int4())
    adamw: Literal["adamw"] = "adamw"
    return [
        Case("4 fragments, d 3, mix 0.5", fragments(Mix(0.5)), "97.4", adamw, 0.01),
        Case("4 fragments, d 3, correct", fragments(), "97.4", adamw, 0.01),
        Case("as mix 0.5, int4", narrow, "97.3", adamw, 0.01),
    ]


def trained(case: Case, seed: int, feed: str = "dealt", steps: int = STEPS, ranks: int = RANKS) -> Outcome:
    """Return the result of a run; raise `RuntimeError` unless all replicas are bitwise equal at its end."""
    first, parts = network(seed), list(FEEDS[feed](seed, steps, ranks))

    def body(world: World) -> tuple[nn.Module, float]:
        own = [(pixels[world.rank], digits[world.rank]) for pixels, digits in parts]
        return _train_rank(world, copy.deepcopy(first), case, own)

    found = run_ranks(ranks, body)
    require_equal([model for model, _ in found])
    return assessed(found[0][0], mean(nbytes for _, nbytes in found))


def _train_rank(
    world: World, model: nn.Module, case: Case, feed: Sequence[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, float]:
    """Return the trained model of a rank, and the bytes that it sent per step."""
    params = model.parameters()
    optimizer = torch.optim.AdamW(params) if case.inner == "adamw" else torch.optim.SGD(params, LR, MOMENTUM)
    replica = commrt.attach(model, optimizer, case.algorithm, world=world)
    for step, (pixels, digits) in enumerate(feed):
        optimizer.param_groups[0]["lr"] = rate(step, len(feed)) * case.rate / LR
        optimizer.zero_grad()
        cross_entropy(model(pixels), digits).backward()
        optimizer.step()
    replica.drain()
    nbytes = replica.stats().nbytes_sent / len(feed)
    replica.consolidate()
    return model, nbytes


def main() -> None:
    """Print a row for each setting whose name contains `--only`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument(
        "--feed", choices=FEEDS, default="dealt", help="images dealt anew in each pass, or kept by a rank"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each setting")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("commrt").setLevel(logging.ERROR)  # all ranks would warn of settings that are here on purpose
    print_head(options.seeds, options.feed)
    synchronous = trained(cases()[0], 0, steps=1).nbytes
    for case in (case for case in cases() if options.only in case.name):
        begin_s = perf_counter()
        found = [trained(case, seed, options.feed, options.steps) for seed in range(options.seeds)]
        print(f"{row(case, found, synchronous)}{perf_counter() - begin_s:>6.0f}", flush=True)


def print_head(seeds: int, feed: str) -> None:
    """Print what the columns are."""
    print(f"accuracy on 1,000 test images and loss on 4,000 training images, mean +- deviation of {seeds} seeds")
    print(f"images: {feed}; see --help")
    print("H: period, d: delay; all replicas were bitwise equal at the end; the run would fail otherwise")
    print("share: bytes relative to synchronous training; simulation: accuracy, not measured by this script")
    head = f"{'setting':<28}{'accuracy %':>16}{'loss':>18}{'B/step':>10}{'share':>8}{'simulation':>12}{'s':>6}"
    print(head, flush=True)


def row(case: Case, found: Sequence[Outcome], synchronous: float) -> str:
    """Return the columns of a setting; `synchronous` training sends so many bytes per step."""
    share = synchronous / mean(each.nbytes for each in found)
    return f"{case.name:<28}{columns(found)}{f'1/{share:.3g}':>8}{case.simulated:>12}"


if __name__ == "__main__":
    main()
