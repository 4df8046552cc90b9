# SPDX-License-Identifier: Apache-2.0
"""Digests of what each algorithm makes of given numbers; ``python dev/bits.py`` writes them to a
file.

Sums of floats depend on the order of additions: a digest shows if it has changed. No case has a
product and a sum that a processor may round as one, so digests should be the same on every machine
(seen with AVX512, AVX2 and neither).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import nn

import commrt
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES
from commrt.errors import UsageError
from commrt.quantization import Int4, Int8
from commrt.testing.ranks import run_ranks

FILE = Path(__file__).parent / "golden_bits.json"
COUNTS = (2, 3, 4, 6, 8)
NUMEL = 1009
"""A prime, which no number of chunks divides."""
RANKS = 4
STEPS = 3
CAP_MB = 0.002
SHAPES = [(40, 7), (64,), (3,), (25, 25)]
WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = {"int8": Int8(), "int4 with feedback": Int4()}


def numbers(shape: tuple[int, ...], *seed: int) -> torch.Tensor:
    """Return numbers in [-1, 1), the same on every machine."""
    words = np.random.Philox(key=int.from_bytes(bytes(seed))).random_raw(int(np.prod(shape)))
    return torch.from_numpy((words >> 40).astype(np.float32) / (1 << 23) - 1).reshape(shape)


def sums(build: Callable[[int], commrt.Schedule], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what ranks have after a schedule, for all numbers of ranks that it takes."""
    found = []
    for count in COUNTS:
        try:
            schedule = build(count)
        except UsageError:  # only powers of two, for instance
            continue

        def body(world: commrt.World, schedule: commrt.Schedule = schedule) -> torch.Tensor:
            row = numbers((NUMEL,), world.rank).to(dtype)
            world.run(schedule, row)
            return row

        found += run_ranks(count, body)
    return found


def averages(
    algorithm: commrt.Algorithm, wire: object, gradients: str = "own"
) -> list[torch.Tensor]:
    """Return the gradients of each rank after each of some steps."""

    def body(world: commrt.World) -> list[torch.Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        options = {"wire": wire, "bucket_cap_mb": CAP_MB, "gradients": gradients}
        replica = commrt.attach(model, algorithm=algorithm, world=world, **options)
        found = []
        for step in range(STEPS):
            for number, param in enumerate(model):
                param.grad = numbers(param.shape, world.rank, step, number)
            replica.average()
            found += [param.grad.clone() for param in model]
        return found

    return [tensor for rank in run_ranks(RANKS, body) for tensor in rank]


def mixed(algorithm: commrt.Algorithm) -> list[torch.Tensor]:
    """Return the weights of each rank after some steps of gossip,
    in which each rank moves its own.
    """

    def body(world: commrt.World) -> list[torch.Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # a product with 1 is exact
        replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=CAP_MB)
        for step in range(STEPS):
            seeds = [(world.rank, step, number) for number in range(len(model))]
            loss = sum(
                (param * numbers(param.shape, *seed)).sum()
                for param, seed in zip(model, seeds, strict=True)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.drain()
        return [param.detach().clone() for param in model]

    return [tensor for rank in run_ranks(RANKS, body) for tensor in rank]


CASES: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{
        f"sum, {name}, {str(dtype)[6:]}": partial(sums, build, dtype)
        for name, build in COLLECTIVES["all_reduce"].items()
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"attach, {name}, {wire}": partial(averages, make(), dtype)
        for name, make in ALGORITHMS.items()
        for wire, dtype in WIRES.items()
    },
    **{
        f"attach, direct, {name}": partial(averages, commrt.Direct(), wire)
        for name, wire in QUANTIZED.items()
    },
    "attach, ring, views": partial(averages, commrt.Ring(), None, "views"),
    "gossip": partial(mixed, commrt.Gossip()),
    "gossip, one step late": partial(mixed, commrt.Gossip(staleness=1)),
    "gossip, rows of 2": partial(mixed, commrt.Gossip(within=2)),
    "gossip of gradients": partial(averages, commrt.Gossip(payload="gradients"), None),
}


def digest(case: str) -> str:
    """Return the digest of all bits of a case."""
    whole = sha256()
    for tensor in CASES[case]():
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def main() -> None:
    """Write all digests, sorted by case."""
    FILE.write_text(
        json.dumps({case: digest(case) for case in sorted(CASES)}, indent=1) + "\n", "utf-8"
    )
    sys.stdout.write(FILE.read_text("utf-8"))


if __name__ == "__main__":
    main()
