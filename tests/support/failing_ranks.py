# SPDX-License-Identifier: Apache-2.0
"""Worker processes of tests in which a rank is killed, stopped, absent or different."""

import os
import signal

import torch
from fault_cost import network
from torch.nn.functional import cross_entropy

import commrt
from commrt.elastic.listener import Listener

STRIKE = 5
"""The step at which something happens."""


def tell_and_pause(tell, message):
    """Say `message`, and do nothing more until a signal ends the process."""
    tell(message)
    while True:
        signal.pause()


def raised(call):
    """The kind and the text of the error of `call`."""
    try:
        call()
    except Exception as error:  # whatever it is: tests look at the text
        return f"{type(error).__name__}: {error}"
    return "no error"


def model_of():
    return network().float()


def joined(algorithm, timeout_s, model):
    """Attached, with a deadline for the steps alone: starting may take its time."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = commrt.init(timeout_s, start_timeout_s=max(timeout_s, 60))
    replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=0.01)
    return replica, optimizer, world


def one_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def struck_in_mid_step(tell, algorithm, victim, timeout_s):
    """In step STRIKE, when its last layers' gradients have left, the victim asks to be struck."""
    model = model_of()
    _, optimizer, world = joined(algorithm, timeout_s, model)

    def wait_for_the_blow(_):
        if world.rank == victim and step == STRIKE:
            tell_and_pause(tell, "mid-step")

    model[2].weight.register_hook(wait_for_the_blow)
    for step in range(STRIKE + 3):  # read by the hook
        one_step(model, optimizer, world.rank, step)


def one_starts_with_another_size(tell, odd_one):
    """Rank `odd_one` was started for a larger world."""
    if os.environ["RANK"] == str(odd_one):
        os.environ["WORLD_SIZE"] = "7"
    commrt.init(10)


def only_the_first_comes(tell, timeout_s):
    """The other ranks end before they join the world."""
    if os.environ["RANK"] == "0":
        commrt.init(timeout_s, start_timeout_s=timeout_s)


def listening(tell):
    """Run a process with a liveness listener, and a child that outlives it, as a DataLoader's worker may."""
    listener = Listener("127.0.0.1")
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        tell_and_pause(lambda _: os.write(begun, b"!"), None)
    os.read(ready, 1)  # the child has let go of the listener
    tell_and_pause(tell, (listener.address, child))


STEPS = 30
"""Steps of `gossiping`."""


def gossiping(tell, algorithm, timeout_s, pauses=(), awaited=None):
    """Trains, saying each step, then makes replicas equal; how it ended. Waits for `awaited` to be evicted."""
    model = model_of()
    replica, optimizer, world = joined(algorithm, timeout_s, model)
    with world:
        try:
            for step in range(STEPS):
                tell(step)
                one_step(model, optimizer, world.rank, step)
        except commrt.elastic.Evicted:
            world.store.set("evicted", "")
            raise
        if world.rank in pauses:
            tell("consolidating")
            signal.pause()
        replica.consolidate()
        if awaited is not None:
            tell("done")
            world.store.wait(["evicted"])
        return replica.replicas_equal(), [loss.rank for loss in replica.lost], list(world.members)
