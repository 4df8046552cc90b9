# SPDX-License-Identifier: Apache-2.0
"""Loops of examples whose processes are killed at any moment, and to which others come late."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from importlib import import_module
from itertools import chain
from pathlib import Path
from random import Random
from threading import Timer
from time import sleep
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import commrt
from commrt.testing.processes import run_processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason="torch 2.14 or later: make newest"
    ),
]
IMAGES = 640
EPOCHS = 3
STEP_S = 0.05
LIMIT_S = 100


class Step(NamedTuple):
    """A step that a process has begun, or made."""

    what: str
    position: int
    """Samples that were used before it, in all epochs."""
    turn: int
    ranks: int
    samples: list[int]


def images(count):
    draw = torch.Generator().manual_seed(0)
    digits = torch.randint(10, (count,), generator=draw)
    pixels = torch.randn(count, 1, 28, 28, generator=draw)
    return SimpleNamespace(pixels=pixels, digits=digits)


def net(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(784, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


def training(tell, example, folder, options, late):
    """Run an example as one process, which notes each step with its samples.

    `late` has the sample at which each process comes that is not there from the start.
    """
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    os.environ["WORLD_SIZE"] = str(size - len(late))
    sys.path.insert(0, str(Path(__file__).parent))
    program = import_module(example)
    models = []
    meetings = []
    log = (folder / f"steps of {number}").open("w")

    class Noted(commrt.Shares):
        def batches(self, loader, replica=None):
            for batch in super().batches(loader, replica):
                self.at = (
                    self.epoch * IMAGES
                    + IMAGES
                    - sum(end - begin for begin, end in self._point.todo)
                )
                order = self._order(0, self.epoch)
                # a step that others have made is made in a later turn, too
                self.turn = meetings[-1].turn
                sleep(STEP_S)
                self.note(
                    "begun",
                    [*map(int, (order[at] for part in self._hand.share for at in range(*part)))],
                )
                yield batch

        def done(self, counted=None):
            super().done(counted)
            self.note("made", [])
            (folder / f"{self.at}").touch()

        def note(self, what, samples):
            log.write(
                json.dumps(Step(what, self.at, self.turn, dist.get_world_size(), samples)) + "\n"
            )
            log.flush()
            tell(self.at)

    program.Meeting = lambda *given: (
        meetings.append(import_module("meeting").Meeting(*given)) or meetings[0]
    )
    program.lenet = lambda seed: models.append(net(seed)) or models[-1]
    program.load = lambda: (images(IMAGES), images(10))
    program.commrt = SimpleNamespace(Shares=Noted)
    while number in late and not any(
        int(file.name) >= late[number] for file in folder.glob("[0-9]*")
    ):
        sleep(0.01)
    sys.argv = [example, *options]
    program.main()
    if meetings[-1].turn < 0:
        return "was late"
    mesh = getattr(next(models[-1].parameters()), "device_mesh", None)
    shards = [param if mesh is None else param.to_local() for param in models[-1].parameters()]
    return mesh and mesh.get_coordinate(), [shard.tolist() for shard in shards]


def steps_of(folder):
    """Return the steps that count, in order: for each, what each of its ranks took."""
    lines = [line for file in folder.glob("steps of *") for line in file.read_text().splitlines()]
    noted = [Step(*json.loads(line)) for line in lines]
    turns = defaultdict(int)  # a step that only dead ranks have made is made again in a later turn
    for each in noted:
        if each.what == "made":
            turns[each.position] = max(turns[each.position], each.turn)
    steps = []
    for position, turn in sorted(turns.items()):
        begun = [each for each in noted if each[:3] == ("begun", position, turn)]
        assert {each.ranks for each in begun} == {len(begun)}, begun
        steps.append((position, [each.samples for each in begun]))
    return steps


def expected(steps):
    """Return the weights of one process that takes these steps."""
    data = images(IMAGES)
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _, shares in steps:
        optimizer.zero_grad()
        for samples in shares:
            (
                cross_entropy(model(data.pixels[samples]), data.digits[samples]) / len(shares)
            ).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def weights_of(parts):
    """Return the weights of each replica, put together of the shards of a row of a mesh if there is
    one.
    """
    rows = defaultdict(list)
    for number, (place, shards) in enumerate(sorted(parts, key=lambda part: part[0] or ())):
        row = number if place is None else place[0]
        rows[row].append([torch.tensor(shard) for shard in shards if shard])
    return [[torch.cat(each) for each in zip(*row, strict=True)] for row in rows.values()]


def survived(example, folder, size, *, options=(), late=(), kills=None, epochs=EPOCHS):
    """Run `size` processes of an example; check samples, and the weights that each returns."""
    # the default is longer than all may take: nobody waits for the dead
    options = ["--epochs", str(epochs), "--grace", str(LIMIT_S), *options]
    limit_s = LIMIT_S + 10 * epochs

    def on_message(number, position, process):
        if kills and position >= kills.get(number, IMAGES * epochs):
            Timer(Random(position).random() / 50, process.kill).start()

    given = example, folder, options, dict(late)
    outcomes = run_processes(
        size, training, *given, limit_s=limit_s, on_message=on_message, holds_store=True
    )
    lived = [each for each in outcomes if each.exit_code == 0 and each.value != "was late"]
    assert [each.error for each in outcomes] == [None] * size
    steps = steps_of(folder)
    for epoch in range(epochs):
        dealt = [
            share
            for position, shares in steps
            if position // IMAGES == epoch
            for share in {*map(tuple, shares)}
        ]
        assert Counter(chain.from_iterable(dealt)) == Counter(range(IMAGES)), epoch
    replicas = weights_of([each.value for each in lived])
    for weights in replicas:
        torch.testing.assert_close(weights, expected(steps), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(weights, replicas[0], rtol=0, atol=0)
    return steps, lived


def test_ddp_goes_on_without_a_killed_rank_and_with_late_ones(tmp_path):
    options = "--kill-rank", "2", "--at-step", "7"
    steps, lived = survived("ddp_survives", tmp_path, 5, options=options, late={3: 500, 4: 1000})
    assert [each.rank for each in lived] == [0, 1, 3, 4]
    sizes = [len(shares) for _, shares in steps]
    assert sizes[:8] == [3] * 7 + [2]
    assert sizes[-1] == 4


def test_fsdp2_goes_on_with_the_replica_that_is_whole_and_with_a_late_rank(tmp_path):
    options = "--kill-rank", "3", "--at-step", "7"
    steps, lived = survived("fsdp2_survives", tmp_path, 5, options=options, late={4: 800})
    assert [each.rank for each in lived] == [0, 1, 2, 4]
    sizes = [len(shares) for _, shares in steps]
    assert sizes[:8] == [4] * 7 + [3]
    assert sizes[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("example", ["ddp_survives", "fsdp2_survives"])
def test_loops_go_on_whenever_ranks_are_killed(tmp_path, example, seed):
    chance = Random(seed)
    ranks = 4 if example == "fsdp2_survives" else 3
    kills = {number: chance.randrange(IMAGES * EPOCHS) for number in chance.sample(range(ranks), 1)}
    late = {ranks: chance.randrange(1000)}
    if example == "ddp_survives":
        kills[late_one := 4] = chance.randrange(1000, IMAGES * EPOCHS)
        late[late_one] = chance.randrange(600)
    options = () if seed % 2 else ("--grace", "1")
    survived(example, tmp_path, ranks + len(late), options=options, late=late, kills=kills)
