# SPDX-License-Identifier: Apache-2.0
"""Worker processes of test_ddp_hook and test_all_reduce: one CNN, real images, three ways to average its gradients."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from contextlib import suppress
from copy import deepcopy

import torch
import torch.distributed as dist
from dataset import lenet, load
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt.algorithms.ring import all_gather
from commrt.elastic.store_membership import StoreMembership
from commrt.runtime.wire import WIRES

STEPS = 12
BATCH = 16


def batches(world, steps=STEPS):
    images, _ = load()
    order = torch.randperm(len(images.digits), generator=torch.Generator().manual_seed(world.rank))
    for part in order[: steps * BATCH].split(BATCH):
        yield images.pixels[part], images.digits[part]


def train(world, algorithm, way, steps=STEPS, **kwargs):
    """All parameters after `steps`, as one row."""
    torch.set_num_threads(1)
    model = lenet(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with way(model, optimizer, world, algorithm, **kwargs) as (call, average):
        for pixels, digits in batches(world, steps):
            optimizer.zero_grad()
            cross_entropy(call(pixels), digits).backward()
            average()
            optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


class Averaging:
    """A context of what is called in place of the model, and what comes between backward() and step()."""

    def __init__(self, model, optimizer, world, algorithm, **kwargs):
        self.model, self.optimizer, self.world, self.algorithm = model, optimizer, world, algorithm
        self.kwargs = kwargs

    def __exit__(self, *_):
        return None


class Attached(Averaging):
    def __enter__(self):
        self.replica = commrt.attach(self.model, self.optimizer, self.algorithm, world=self.world)
        return self.model, lambda: None

    def __exit__(self, *_):
        self.replica.detach()


class Hooked(Averaging):
    def __enter__(self):
        wrapped = DistributedDataParallel(self.model, **self.kwargs)
        wrapped.register_comm_hook(commrt.DDPState(self.algorithm, world=self.world), commrt.ddp_hook)
        return wrapped, lambda: None


class Explicit(Averaging):
    def __enter__(self):
        return self.model, self.average

    def average(self):
        works = [
            self.world.all_reduce(param.grad, algorithm=self.algorithm, async_op=True)
            for param in self.model.parameters()
        ]
        for work in works:
            work.wait(timeout=30)


class DDPAlone(Averaging):
    def __enter__(self):
        return DistributedDataParallel(self.model, **self.kwargs), lambda: None


def compare(tell, algorithm):
    """(distances of the three ways to DDP alone, all three bitwise equal, ranks equal)."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    alone = train(world, None, DDPAlone)
    ways = [train(world, algorithm, way) for way in (Attached, Hooked, Explicit)]
    same = [torch.equal(ways[0], way) for way in ways]
    ranks = [world.all_equal("weights", str(way.double().sum().item())) for way in ways]
    return [float((way - alone).abs().max()) for way in ways], all(same), all(ranks)


def ddp_ways(tell):
    """Distance of our hook to DDP alone, for the settings of DDP."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    found = {}
    for name, kwargs in {
        "static graph": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "many buckets": {"bucket_cap_mb": 0.02},
        "unused parameters": {"find_unused_parameters": True},
    }.items():
        ours = train(world, commrt.Ring(), Hooked, steps=4, **kwargs)  # DDP makes other buckets after the first
        found[name] = float((ours - train(world, None, DDPAlone, steps=4, **kwargs)).abs().max())
    found["join"] = joined(world)
    return found


def joined(world):
    """Uneven batches in DDP's join(): the distance between the hook and DDP alone."""

    def run(hook):
        model = DistributedDataParallel(lenet(seed=1), bucket_cap_mb=0.02)
        if hook:
            model.register_comm_hook(commrt.DDPState(world=world), commrt.ddp_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join():
            for pixels, digits in list(batches(world))[: 3 + world.rank]:
                optimizer.zero_grad()
                cross_entropy(model(pixels), digits).backward()
                optimizer.step()
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    return float((run(hook=True) - run(hook=False)).abs().max())


def lose_one(tell):
    """Kill rank 1 in a step; return the error of backward() on the other ranks."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=10)
    model = DistributedDataParallel(lenet(seed=1))
    model.register_comm_hook(commrt.DDPState(world=world), commrt.ddp_hook)
    for number, (pixels, digits) in enumerate(batches(world)):
        loss = cross_entropy(model(pixels), digits)
        if number == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
        except commrt.TransportError as error:
            return type(error).__name__, error.place.step, error.place.bucket
    return None


def over_two_groups(tell):
    """Train one DDP model on each half of the ranks; return the error of backward()."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=groups[world.rank // 2])
    model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)
    try:
        model(torch.ones(2, 3)).sum().backward()
    except commrt.UsageError as error:
        return str(error)
    return None


def one_world_after_another(tell):
    """The gradients of a model of DDP in two worlds; and does a copy of a state keep the world that was given?"""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)
    found = []
    for _ in range(2):
        with commrt.init(timeout_s=30) as world:
            model.zero_grad()
            model(torch.full((1, 3), float(world.rank))).sum().backward()
            found.append(model.module.weight.grad.tolist())
            given = deepcopy(commrt.DDPState(world=world)).world is world
    return found, given


def one_state_for_two_models(tell):
    """Use one `DDPState` for two models; return the second one's error, and if a copy of the first trains equally."""
    dist.init_process_group("gloo")
    state, said = commrt.DDPState(), None
    models = [DistributedDataParallel(torch.nn.Linear(3, 1)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(state, commrt.ddp_hook)
    models[0](torch.ones(2, 3)).sum().backward()
    copied = deepcopy(models[0])
    try:
        models[1](torch.ones(2, 3)).sum().backward()
    except commrt.UsageError as error:
        said = str(error)
    return said, torch.equal(copied.module.weight, models[0].module.weight)


def runs_without_rank_3(tell, algorithm):
    """After rank 3 was killed, call world.run() for all ranks, and with a size that is none for three of them.

    Return both errors, then sums of the remaining ranks.
    """
    world = commrt.init(timeout_s=5, start_timeout_s=60)
    model = torch.nn.Linear(3, 1)
    commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
    model(torch.ones(2, 3)).sum().backward()
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_reduce(torch.ones(1), "sum")
    said = []
    for schedule in (commrt.Ring().schedule(0, 4), all_gather(3).over(world.members, world=4)):
        try:
            world.run(schedule, torch.ones(8))
        except commrt.UsageError as error:
            said.append(str(error))
    world.run(commrt.Ring().schedule(0, 3).over(world.members, world=4), three := torch.ones(8))
    world.all_reduce(left := torch.ones(1), "sum")
    world.close()
    return *said, three.unique().tolist(), left.item()


def two_models_in_two_orders(tell):
    """Run backward() of two equal models in different orders on two ranks; return the error."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=30)
    models = [DistributedDataParallel(torch.nn.Linear(3, 1)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)
        model(torch.ones(2, 3)).sum().backward()
    try:
        for model in models if world.rank else reversed(models):
            model(torch.ones(2, 3)).sum().backward()
    except commrt.CommrtError as error:
        return type(error).__name__
    return None


def two_wires(tell):
    """Call all_reduce() with different wires on two ranks, after both wires were used; return the error."""
    wires = WIRES[1:]
    world = commrt.init(timeout_s=30)
    tensor = torch.ones(8)
    for wire in wires:
        world.all_reduce(tensor, wire=wire)
    try:
        world.all_reduce(tensor, wire=wires[world.rank])
    except commrt.CommrtError as error:
        return type(error).__name__
    return None


def a_known_sum_meets_a_new_one(tell, numel, wire, new_to):
    """Repeat a sum of `numel` elements while ranks `new_to` sum another size; return the error and the tensor."""
    world = commrt.init(timeout_s=5)
    world.all_reduce(torch.ones(numel), wire=wire)
    tensor = torch.ones(1000 if world.rank in new_to else numel)
    try:
        world.all_reduce(tensor, "sum", wire=wire)
    except commrt.CommrtError as error:
        return type(error).__name__, tensor.unique().tolist()
    return None, tensor.unique().tolist()


def tuples_of_another_thread(tell, models):
    """What ends the making of tuples in a thread while each of `models` models looks for its state."""
    dist.init_process_group("gloo")
    errors, over = [], threading.Event()

    def make():
        while not over.is_set():
            try:
                tuple(number for number in range(20_000))
            except SystemError as error:
                errors.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    for _ in range(models):
        model = hooked()
        model(torch.ones(2, 3)).sum().backward()
    over.set()
    maker.join()
    return len(errors)


def hooked(module=None, state=None):
    """A model of DDP with the hook."""
    model = DistributedDataParallel(torch.nn.Linear(3, 1) if module is None else module)
    model.register_comm_hook(commrt.DDPState() if state is None else state, commrt.ddp_hook)
    return model


def one_state_after_a_failure(tell):
    """Rank 1 fails where rank 0 has begun a step; how far the state's steps are in the next world, and of its copy."""
    dist.init_process_group("gloo")
    module, state, steps = torch.nn.Linear(3, 1), commrt.DDPState(), []
    for bad_step in (2, None):
        with suppress(ZeroDivisionError, commrt.CommrtError), commrt.init(timeout_s=10) as world:
            model = hooked(module, state)
            for step in range(3):
                divisor = 0 if (step, world.rank) == (bad_step, 1) else 1
                (model(torch.ones(2, 3)).sum() * (1 / divisor)).backward()
            steps.append(state.step)
            world.agree("end", of="world")
        dist.barrier()
    return steps, pickle.loads(pickle.dumps(state)).step  # noqa: S301  # its own


def silent_where_another_has_joined(tell):
    """Let rank 1 sleep in its last step, for which rank 0 waits in DDP's join(); return rank 0's error."""
    dist.init_process_group("gloo")
    world = commrt.init(timeout_s=1)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)
    try:
        with model.join():
            for step in range(2 + world.rank):
                loss = model(torch.ones(2, 3)).sum()
                if step == 2:
                    threading.Event().wait(3)
                loss.backward()
    except commrt.TransportError as error:
        return type(error).__name__, error.place.step
    return None


def after_its_group(tell):
    """Return the error of backward() of a DDP model after its process group was replaced."""
    for number in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with commrt.init():
            if number == 0:
                model = DistributedDataParallel(torch.nn.Linear(3, 1))
                model.register_comm_hook(commrt.DDPState(), commrt.ddp_hook)
            try:
                model(torch.ones(2, 3)).sum().backward()
            except commrt.UsageError as error:
                return str(error)
        dist.destroy_process_group()
    return None


def in_inference_mode(tell, algorithms):
    """Call collectives in inference mode, in which torch makes tensors that other threads cannot write to."""
    found = []
    with commrt.init(timeout_s=10) as world:
        for algorithm in algorithms:
            model = torch.nn.Linear(3, 1)
            replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
            tensor = torch.ones(4)
            with torch.inference_mode():
                world.all_reduce(tensor, "sum")
                replica.consolidate()
                found.append((tensor.tolist(), replica.replicas_equal(), replica.disagreement()))
            replica.detach()
    return found


def detached_first(tell, algorithm, path):
    """Rank 0, which holds the store, detaches and closes; then the others ask for a mean. What rank 0 did meanwhile."""
    stay_while = StoreMembership.stay_while

    def staying(membership, others):
        path.write_text("stays")
        return stay_while(membership, others)

    StoreMembership.stay_while = staying
    with commrt.init(timeout_s=10) as world:
        model = torch.nn.Linear(3, 1)
        replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
        if world.rank:
            while not path.exists():
                threading.Event().wait(0.01)
            replica.disagreement()
        replica.detach()
    if not path.exists():
        path.write_text("left")
    return path.read_text()
