# SPDX-License-Identifier: Apache-2.0
"""Train on MNIST by gossip, all-reduce or alone, and compare: ``python studies/gossip/gossip_learning.py``.

A small network trains with momentum, and each rank has its own shard. One batched network simulates all ranks of a run;
partners are those of the real schedules. With ``--real`` the runtime trains instead, one thread per rank.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt import Algorithm, World
from commrt.testing.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import BATCH, Images, batches, load, shards

__all__ = ["LR", "MOMENTUM", "RULES", "Network", "Outcome", "rate", "simulated", "spread", "trained"]

RULES: dict[str, Algorithm | None] = {
    "all-reduce": commrt.Ring(),
    "gossip, weights": commrt.Gossip(),
    "gossip, weights, one step late": commrt.Gossip(staleness=1),
    "gossip, gradients only": commrt.Gossip(payload="gradients"),
    "no communication": None,
}
HIDDEN, MOMENTUM, LR, STEPS = 64, 0.9, 0.05, 560


def rate(step: int, steps: int) -> float:
    """Return the learning rate, along half a cosine."""
    return LR * (1 + math.cos(math.pi * step / steps)) / 2


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    accuracy: float
    """Mean accuracy of the ranks."""
    accuracy_of_mean: float
    """Accuracy of the averaged network."""
    disagreement: float
    """Relative distance of the farthest rank from the mean."""


def initial_params(seed: int) -> list[Tensor]:
    """Return the initial weights and biases of both layers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(784, HIDDEN), (HIDDEN, 10)]
    layers = [(torch.randn(a, b, generator=generator) * (2 / a) ** 0.5, torch.zeros(b)) for a, b in sizes]
    return [tensor for layer in layers for tensor in layer]


def outputs(params: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the outputs [ranks, n, 10] for params [ranks, ...] and x [ranks, n, 784]."""
    hidden = torch.relu(x @ params[0] + params[1].unsqueeze(1))
    return hidden @ params[2] + params[3].unsqueeze(1)


def partners(algorithm: Algorithm, step: int, ranks: int) -> Tensor:
    """Return, for each rank, the rank it receives from."""
    source = torch.arange(ranks)
    for hop in algorithm.schedule(step, ranks).steps():
        source[torch.from_numpy(hop.dst)] = torch.from_numpy(hop.src)
    return source


def simulated(rule: str, ranks: int, seed: int, data: tuple[Images, Images], steps: int = STEPS) -> Outcome:
    """Train all ranks at once, as one batched network."""
    algorithm = RULES[rule]
    x, y = shards(data[0], ranks, seed)
    params = [tensor.expand(ranks, *tensor.shape).clone().requires_grad_() for tensor in initial_params(seed)]
    momentum, in_flight = [torch.zeros_like(param) for param in params], []
    rows = torch.arange(ranks).unsqueeze(1)
    for step, places in enumerate(batches(x.shape[1], ranks, seed, steps)):
        scores = outputs(params, x[rows, places])
        loss = cross_entropy(scores.flatten(0, 1), y[rows, places].flatten(), reduction="sum") / BATCH
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            sgd_step(params, momentum, shared_gradients(algorithm, step, grads), rate(step, steps))
            if isinstance(algorithm, commrt.Gossip) and algorithm.payload == "weights":
                in_flight.append((partners(algorithm, step, ranks), [param.clone() for param in params]))
                if len(in_flight) > algorithm.staleness:
                    mix(params, *in_flight.pop(0), algorithm.share)
    params = [param.detach() for param in params]
    for source, sent in in_flight:
        mix(params, source, sent, algorithm.share)
    return assessed(params, data[1])


def shared_gradients(algorithm: Algorithm | None, step: int, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients that each rank uses."""
    if isinstance(algorithm, commrt.Ring):
        return [grad.mean(0, keepdim=True).expand_as(grad) for grad in grads]
    if isinstance(algorithm, commrt.Gossip) and algorithm.payload == "gradients":
        source = partners(algorithm, step, len(grads[0]))
        return [(grad + grad[source]) / 2 for grad in grads]
    return grads


def sgd_step(params: list[Tensor], momentum: list[Tensor], grads: Sequence[Tensor], lr: float) -> None:
    """Take a step of SGD."""
    for param, memory, grad in zip(params, momentum, grads, strict=True):
        memory.mul_(MOMENTUM).add_(grad)
        param.sub_(lr * memory)


def mix(params: list[Tensor], source: Tensor, sent: list[Tensor], share: float) -> None:
    """Mix weights as the runtime does."""
    for param, ours in zip(params, sent, strict=True):
        param.add_(share * (ours[source] - ours))


def assessed(params: list[Tensor], test: Images) -> Outcome:
    """Return the results for params [ranks, ...]."""
    x, middle = test.pixels.flatten(1), [param.mean(0, keepdim=True) for param in params]
    right = outputs(params, x.expand(len(params[0]), *x.shape)).argmax(2) == test.digits
    right_of_mean = outputs(middle, x.unsqueeze(0)).argmax(2) == test.digits
    apart = sum((param - center).square().flatten(1).sum(1) for param, center in zip(params, middle, strict=True))
    norm = sum(center.square().sum() for center in middle)
    return Outcome(right.float().mean().item(), right_of_mean.float().mean().item(), (apart.max() / norm).sqrt().item())


class Network(nn.Module):
    """The network of one rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(initial_params(seed))

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 784] to [n, 10]."""
        return outputs([param.unsqueeze(0) for param in self.params], x.unsqueeze(0))[0]


def shuffled_batches(world: World, x: Tensor, y: Tensor, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of samples that the ring shuffle moves on by one rank in each pass."""
    ring = commrt.RingShuffle((x[world.rank], y[world.rank]), BATCH, world=world, seed=seed)
    passes = (batch for _ in range(steps) for batch in ring)
    yield from islice(passes, steps)
    ring.drain()


def own_batches(world: World, x: Tensor, y: Tensor, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of a rank's own shard."""
    for places in batches(x.shape[1], len(x), seed, steps):
        yield x[world.rank][places[world.rank]], y[world.rank][places[world.rank]]


def trained(
    rule: str,
    ranks: int,
    seed: int,
    data: tuple[Images, Images],
    steps: int = STEPS,
    *,
    sorted_by_class: bool = False,
    ring: bool = False,
) -> Outcome:
    """Train with the runtime, one thread per rank."""
    x, y = shards(data[0], ranks, seed, sorted_by_class)

    def body(world: World) -> tuple[int, list[Tensor]]:
        model = Network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        algorithm = RULES[rule]
        replica = None if algorithm is None else commrt.attach(model, optimizer, algorithm, world=world)
        for step, (pixels, digits) in enumerate((shuffled_batches if ring else own_batches)(world, x, y, seed, steps)):
            optimizer.param_groups[0]["lr"] = rate(step, steps)
            optimizer.zero_grad()
            cross_entropy(model(pixels), digits).backward()
            optimizer.step()
        if replica is not None:
            replica.drain()
        return world.rank, [param.detach() for param in model.parameters()]

    found = [params for _, params in sorted(run_ranks(ranks, body), key=lambda pair: pair[0])]
    return assessed([torch.stack(parts) for parts in zip(*found, strict=True)], data[1])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32], help="number of ranks")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument("--real", action="store_true", help="train with the runtime, one thread per rank")
    parser.add_argument("--sorted", action="store_true", help="sort shards by class; with and without the ring shuffle")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = load(), []
    for ranks in options.ranks:
        for rule, run in runs(options.real, options.sorted):
            found = [run(ranks=ranks, seed=seed, data=data, steps=options.steps) for seed in range(options.seeds)]
            rows.append({"ranks": ranks, "rule": rule, "runs": [asdict(outcome) for outcome in found]})
            if not options.json:
                print(f"{ranks:>3} {rule:<32}", *(spread(found, field) for field in asdict(found[0])), sep="  ")
    if options.json:
        print(json.dumps(rows))


def runs(real: bool, sorted_by_class: bool) -> Iterator[tuple[str, Callable[..., Outcome]]]:
    """Yield the names of runs, and the functions that run them."""
    for rule in RULES:
        if sorted_by_class:
            yield rule, partial(trained, rule, sorted_by_class=True)
            yield f"{rule}, ring", partial(trained, rule, sorted_by_class=True, ring=True)
        else:
            yield rule, partial(trained if real else simulated, rule)


def spread(outcomes: Sequence[Outcome], field: str) -> str:
    """Format mean and standard deviation."""
    values = [getattr(outcome, field) for outcome in outcomes]
    return f"{field.replace('_', ' ')} {mean(values):.4f} +- {stdev(values) if len(values) > 1 else 0:.4f}"


if __name__ == "__main__":
    main()
