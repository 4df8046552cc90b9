# SPDX-License-Identifier: Apache-2.0
"""Loops of examples whose processes are killed at any moment, and to which others come late."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import chain
from random import Random
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from surviving_loops import IMAGES, Step, images, net, training
from torch.nn.functional import cross_entropy

from commrt.testing.processes import run_processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason="torch 2.14 or later: make newest"
    ),
]
EPOCHS = 3
LIMIT_S = 100


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
