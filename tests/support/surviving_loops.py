# SPDX-License-Identifier: Apache-2.0
"""The processes of tests that kill ranks of the examples' loops: they note each step with its samples."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist

import commrt

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGES = 640
STEP_S = 0.05


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
    sys.path.insert(0, str(EXAMPLES))
    program = import_module(example)
    models = []
    meetings = []
    log = (folder / f"steps of {number}").open("w")

    class Noted(commrt.Shares):
        def batches(self, loader, replica=None):
            for batch in super().batches(loader, replica):
                self.at = self.epoch * IMAGES + IMAGES - sum(end - begin for begin, end in self._point.todo)
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
            log.write(json.dumps(Step(what, self.at, self.turn, dist.get_world_size(), samples)) + "\n")
            log.flush()
            tell(self.at)

    program.Meeting = lambda *given: meetings.append(import_module("meeting").Meeting(*given)) or meetings[0]
    program.lenet = lambda seed: models.append(net(seed)) or models[-1]
    program.load = lambda: (images(IMAGES), images(10))
    program.commrt = SimpleNamespace(Shares=Noted)
    while number in late and not any(int(file.name) >= late[number] for file in folder.glob("[0-9]*")):
        sleep(0.01)
    sys.argv = [example, *options]
    program.main()
    if meetings[-1].turn < 0:
        return "was late"
    mesh = getattr(next(models[-1].parameters()), "device_mesh", None)
    shards = [param if mesh is None else param.to_local() for param in models[-1].parameters()]
    return mesh and mesh.get_coordinate(), [shard.tolist() for shard in shards]
