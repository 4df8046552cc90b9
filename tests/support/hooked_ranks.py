# SPDX-License-Identifier: Apache-2.0
"""What the worker processes of test_ddp_hook run."""

import pickle
from contextlib import nullcontext
from copy import deepcopy
from functools import partial, wraps

import torch
import torch.distributed as dist
from dataset import lenet, load
from failing_ranks import raised
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commrt

STEPS = 12
BATCH = 16


def in_a_group(timeout_s=30):
    """Call a body with the world of a new group of torch.distributed."""

    def decorate(body):
        @wraps(body)
        def run(_, *args):
            dist.init_process_group("gloo")
            return body(commrt.init(timeout_s=timeout_s), *args)

        return run

    return decorate


def hooked(module=None, state=None, **options):
    model = DistributedDataParallel(nn.Linear(3, 1) if module is None else module, **options)
    model.register_comm_hook(commrt.DDPState() if state is None else state, commrt.ddp_hook)
    return model


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


def problem(rank, real):
    """A CNN and images, or a small network and noise; data is this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    if real:
        images, _ = load()
        chosen = torch.randperm(len(images.digits), generator=generator)[: STEPS * BATCH]
        return lenet(seed=1), images.pixels[chosen], images.digits[chosen]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
    inputs = torch.randn(STEPS * BATCH, 20, generator=generator)
    return model, inputs, torch.randint(0, 10, (STEPS * BATCH,), generator=generator)


def train(world, real, way, steps=STEPS, *, joins=False):
    """All parameters after `steps`, as one row; `way` says what to call as the model, and what after backward()."""
    model, inputs, classes = problem(world.rank, real)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    call, average = way(model, optimizer)
    with call.join() if joins else nullcontext():
        for x, y in zip(inputs.split(BATCH)[:steps], classes.split(BATCH)[:steps], strict=True):
            optimizer.zero_grad()
            cross_entropy(call(x), y).backward()
            average()
            optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).numpy()


def nothing():
    pass


def alone(model, _, **options):
    return DistributedDataParallel(model, **options), nothing


def with_hook(model, _, *, world, algorithm=None, **options):
    return hooked(model, commrt.DDPState(algorithm or commrt.Ring(), world=world), **options), nothing


def attached(model, optimizer, *, world, algorithm):
    commrt.attach(model, optimizer, algorithm, world=world)
    return model, nothing


def by_hand(model, _, *, world, algorithm):
    def average():
        params = model.parameters()
        works = [world.all_reduce(param.grad, algorithm=algorithm, async_op=True) for param in params]
        for work in works:
            work.wait(timeout=30)

    return model, average


@in_a_group()
def three_ways(world, algorithm, real):
    """The parameters by DDP alone, then by each of our ways."""
    ways = [partial(way, world=world, algorithm=algorithm) for way in (attached, with_hook, by_hand)]
    return [train(world, real, way) for way in (alone, *ways)]


@in_a_group()
def settings_of_ddp(world, real):
    """The parameters by DDP alone and with the hook, for each of several settings; with the last, in join()."""
    found = []
    for options, steps, joins in (
        ({"static_graph": True, "gradient_as_bucket_view": True}, 4, False),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.005}, 4, False),
        ({"bucket_cap_mb": 0.005}, 3 + world.rank, True),
    ):
        ways = [partial(alone, **options), partial(with_hook, world=world, **options)]
        found.append([train(world, real, way, steps, joins=joins) for way in ways])
    return found


@in_a_group()
def over_two_groups(world):
    """Train one DDP model on each half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = hooked(process_group=groups[world.rank // 2])
    return raised(lambda: backward(model))


@in_a_group()
def one_state_for_two_models(world):
    """The second model's error, if a copy of the first trains equally, and if a copied state keeps its world."""
    state = commrt.DDPState(world=world)
    models = [hooked(state=state), hooked(state=state)]
    backward(models[0])
    copied = deepcopy(models[0])
    are_equal = torch.equal(copied.module.weight, models[0].module.weight)
    return raised(lambda: backward(models[1])), are_equal, deepcopy(state).world is world


@in_a_group()
def two_models_in_two_orders(world):
    """Run backward() of two equal models in different orders on two ranks."""
    models = [hooked(), hooked()]
    for model in models:
        backward(model)
    return raised(lambda: [backward(model) for model in (models if world.rank else models[::-1])])


def one_state_after_a_failure(_):
    """Rank 1 fails where rank 0 has begun a step; the errors, how far the state is in the next world, and its copy."""
    dist.init_process_group("gloo")
    module, state, steps, errors = nn.Linear(3, 1), commrt.DDPState(), [], []
    for bad_step in (2, None):
        try:
            with commrt.init(timeout_s=10) as world:
                model = hooked(module, state)
                for step in range(3):
                    divisor = 0 if (step, world.rank) == (bad_step, 1) else 1
                    (model(torch.ones(2, 3)).sum() * (1 / divisor)).backward()
                steps.append(state.step)
                world.agree("end", of="world")
        except (ZeroDivisionError, commrt.CommrtError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return errors, steps, pickle.loads(pickle.dumps(state)).step  # noqa: S301  # its own


def after_its_group(_):
    """The error of backward() of a DDP model after its process group was replaced."""
    for number in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with commrt.init():
            if number == 0:
                model = hooked()
            error = raised(partial(backward, model))
        dist.destroy_process_group()
    return error
