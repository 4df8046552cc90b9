# SPDX-License-Identifier: Apache-2.0
"""Compare local SGD with synchronous training over many seeds, without commrt's runtime.

``python studies/local_sgd/plain_local_sgd.py`` has the set-up of `local_accuracy`, in plain torch: one batched network
holds all ranks of several seeds. So it is an independent check of the runtime (`test_local_accuracy` compares the
weights), and it affords more seeds. A seed has the same first weights and batches in all settings, so the table shows
the mean difference to synchronous training, seed by seed, with its standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from commrt.local_sgd import LocalSGD, Mix

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import FEEDS
from small_cnn import LR, MOMENTUM, RANKS, STEPS, Outcome, assessed, network, rate, spread

__all__ = ["PlainRanks", "trained"]

AT_ONCE = 5
"""Seeds that are trained in one batched network."""


class PlainRanks:
    """All ranks of some seeds: a dict of parameters [seeds x ranks, ...]; without an algorithm they are synchronous."""

    def __init__(self, models: Sequence[nn.Module], ranks: int, algorithm: LocalSGD | None) -> None:
        self._model, self._ranks, self._algorithm = models[0], ranks, algorithm
        named = [dict(model.named_parameters()) for model in models]
        self.weights = {
            name: torch.stack([params[name].detach() for params in named]).repeat_interleave(ranks, 0)
            for name in named[0]
        }
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._sent: dict[str, Tensor] | None = None
        self._sent_at = self._step = 0
        self._gradients = vmap(grad(self._loss))

    def _loss(self, params: dict[str, Tensor], pixels: Tensor, digits: Tensor) -> Tensor:
        return cross_entropy(functional_call(self._model, params, (pixels,)), digits)

    def step(self, pixels: Tensor, digits: Tensor, lr: float) -> None:
        """Take a step of momentum SGD on [seeds x ranks, batch, ...], then exchange what is due."""
        self._step += 1
        for name, gradient in self._gradients(self.weights, pixels, digits).items():
            used = self._mean(gradient) if self._algorithm is None else gradient
            self._momentum[name].mul_(MOMENTUM).add_(used)
            self.weights[name].sub_(lr * self._momentum[name])
        if self._algorithm is not None:
            self._exchange(self._algorithm)

    def _exchange(self, algorithm: LocalSGD) -> None:
        """Merge, then send, then merge what is not late."""
        self._merge_if_due(algorithm)
        if self._step % algorithm.period == 0:
            self._sent, self._sent_at = {name: tensor.clone() for name, tensor in self.weights.items()}, self._step
            self._merge_if_due(algorithm)

    def _merge_if_due(self, algorithm: LocalSGD) -> None:
        if self._sent is not None and self._step - self._sent_at >= algorithm.delay:
            self._merge(algorithm, self._sent)

    def _merge(self, algorithm: LocalSGD, sent: dict[str, Tensor]) -> None:
        for name, own in sent.items():
            average, now = self._mean(own), self.weights[name]
            if isinstance(algorithm.merge, Mix):
                self.weights[name] = algorithm.merge.local * now + (1 - algorithm.merge.local) * average
            else:
                self.weights[name] = average + (now - own)
        self._sent = None

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks of each seed, [seeds x ranks, ...]."""
        each = values.unflatten(0, (-1, self._ranks))
        return each.mean(1, keepdim=True).expand_as(each).flatten(0, 1)

    def consolidated(self) -> list[nn.Module]:
        """Merge what is in flight, and return a model of the mean weights for each seed."""
        if self._algorithm is not None and self._sent is not None:
            self._merge(self._algorithm, self._sent)
        means = {name: self._mean(tensor) for name, tensor in self.weights.items()}
        found: list[nn.Module] = []
        for row in range(0, len(next(iter(means.values()))), self._ranks):
            found.append(network(0))
            found[-1].load_state_dict({name: tensor[row] for name, tensor in means.items()})
        return found


def trained(
    algorithm: LocalSGD | None, seeds: Sequence[int], feed: str = "dealt", steps: int = STEPS, ranks: int = RANKS
) -> list[Outcome]:
    """Return the result of each seed; outcomes have no bytes."""
    plain = PlainRanks([network(seed) for seed in seeds], ranks, algorithm)
    for step, parts in enumerate(zip(*(FEEDS[feed](seed, steps, ranks) for seed in seeds), strict=True)):
        pixels, digits = (torch.cat(each) for each in zip(*parts, strict=True))
        plain.step(pixels, digits, rate(step, steps))
    return [assessed(model, 0.0) for model in plain.consolidated()]


def groups(seeds: int) -> list[range]:
    """Return the seeds that are trained at once."""
    return [range(first, min(first + AT_ONCE, seeds)) for first in range(0, seeds, AT_ONCE)]


def settings() -> dict[str, LocalSGD | None]:
    """Return synchronous training, and local SGD whose delays should cost no accuracy."""
    local = {f"H {period}, d {delay} correct": LocalSGD(period, delay) for period in (4, 16) for delay in range(5)}
    return {"synchronous": None, **local}


def paired(found: Sequence[Outcome], synchronous: Sequence[Outcome]) -> str:
    """Return the mean difference of accuracies, and its standard error."""
    gains = [ours.accuracy - theirs.accuracy for ours, theirs in zip(found, synchronous, strict=True)]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return f"{mean(gains):+.2f} +- {error:.2f}"


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="local settings whose name contains this")
    parser.add_argument("--feed", choices=FEEDS, default="dealt", help="as in local_accuracy.py")
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each setting")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"plain torch, images {options.feed}, peak rate {LR}, mean +- deviation of {options.seeds} seeds")
    print(f"{'setting':<24}{'accuracy %':>16}{'loss':>18}{'difference':>16}{'s':>6}", flush=True)
    synchronous: list[Outcome] = []
    for name, algorithm in settings().items():
        if algorithm is None or options.only in name:
            begin_s = perf_counter()
            runs = (trained(algorithm, seeds, options.feed, options.steps) for seeds in groups(options.seeds))
            found = [*chain.from_iterable(runs)]
            synchronous = synchronous or found
            print_row(name, found, synchronous, perf_counter() - begin_s)


def print_row(name: str, found: Sequence[Outcome], synchronous: Sequence[Outcome], lasted_s: float) -> None:
    """Print the results of one setting."""
    accuracy, loss = spread([each.accuracy for each in found], 2), spread([each.loss for each in found], 4)
    print(f"{name:<24}{accuracy:>16}{loss:>18}{paired(found, synchronous):>16}{lasted_s:>6.0f}", flush=True)


if __name__ == "__main__":
    main()
