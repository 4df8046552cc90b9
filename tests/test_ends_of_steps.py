# SPDX-License-Identifier: Apache-2.0
"""Which optimizers step a model, and when a step ends: what is never exchanged is refused."""

import copy
from functools import partial

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import batch, model_of, params, same

import commrt
from commrt import BackupWorkers, Gossip, Torus2D
from commrt.errors import UsageError
from commrt.local_sgd import LocalSGD
from commrt.testing.ranks import run_ranks
from commrt.training.optimizer_steps import wrapped_as

WAYS = [Gossip(), LocalSGD(4), Torus2D()]


def sgd(part):
    return torch.optim.SGD(part.parameters(), lr=0.01)


def halves_of(model):
    return [sgd(model[0]), sgd(model[2:])]


def backward(model, step, rank):
    model(batch(step, rank)).square().mean().backward()


def nothing(*_):
    pass


def train(world, algorithm, model, given, update, after_attach=nothing, passes=8):
    """Give optimizers to attach(), and call `update` after each backward pass; all passes must be exchanged."""
    replica = commrt.attach(model, given, algorithm, world=world)
    after_attach()
    for step in range(passes):
        backward(model, step, world.rank)
        update(step)
        model.zero_grad()
    assert replica.step >= passes - 2  # the latest steps may not have ended
    replica.drain()
    assert replica.step == passes
    assert replica.stats().nbytes_sent > 0
    assert replica.disagreement() < 1e-3


@for_each("saved_at", [4, 5, 8])
def test_a_resumed_run_ends_its_steps_where_an_unbroken_one_does(saved_at):
    def body(world, stop):
        def attached(*states):
            model = model_of()
            halves = halves_of(model)
            owners = model, *halves, commrt.attach(model, halves, LocalSGD(4), world=world)
            for owner, state in zip(owners, states, strict=False):
                owner.load_state_dict(state)
            return owners

        model, first, second, replica = attached()
        for step in range(14):
            if step == stop:
                states = copy.deepcopy([owner.state_dict() for owner in (model, first, second, replica)])
                replica.detach()
                model, first, second, replica = attached(*states)
            backward(model, step, world.rank)
            first.step()
            if step % 7 == 6:
                second.step()
            model.zero_grad()
        replica.drain()
        return params(model)

    unbroken, resumed = (run_ranks(2, partial(body, stop=stop)) for stop in (None, saved_at))
    assert all(map(same, unbroken, resumed))


# What a function of a model returns: the optimizer to give, what to do after each pass, and what to do after attach().


def made_anew(model):
    optimizers = [sgd(model)]

    def update(step):
        if step == 6:
            optimizers[0] = sgd(model)
        optimizers[0].step()

    return optimizers[0], update


def exchange_frozen(model):
    model[0].requires_grad_(False)
    model[2:].requires_grad_(True)


def thawed_for_another(model):
    model[2:].requires_grad_(False)
    given, other = halves_of(model)
    return given, lambda _: other.step(), partial(exchange_frozen, model)


def thawed_for_the_same(model):
    model[2:].requires_grad_(False)
    given = sgd(model)
    return given, lambda _: given.step(), partial(exchange_frozen, model)


STRANGERS = [
    (made_anew, r"SGD steps 0\.weight, and was not given to attach\(\): detach\(\), and attach\(\) again"),
    (thawed_for_another, r"the optimizer steps 2\.weight, which was frozen, absent"),
    (thawed_for_the_same, r"2\.weight was frozen and is not any more"),
]


@for_each(("case", "algorithm"), taking_turns(2 * STRANGERS, [*WAYS, BackupWorkers(backups=0)]))
@on_ranks(2)
def test_a_step_of_what_is_not_exchanged_is_refused(world, case, algorithm):
    prepare, message = case
    model = model_of()
    with pytest.raises(UsageError, match=message):
        train(world, algorithm, model, *prepare(model))


def stepped_by_hand(model):
    def update(_):
        for param in model.parameters():
            param.data -= 0.01 * param.grad

    return update


@for_each("algorithm", [Gossip(), Gossip(staleness=1), Torus2D()])
@on_ranks(2)
def test_without_optimizers_only_steps_of_what_was_not_attached_are_refused(world, algorithm):
    for update_of in (lambda model: made_anew(model)[1], stepped_by_hand):
        model = model_of()
        train(world, algorithm, model, None, update_of(model), passes=24)
    model = model_of()
    with pytest.raises(UsageError, match="which was frozen, absent"):
        train(world, algorithm, model, None, *thawed_for_another(model)[1:])


@for_each(
    ("algorithm", "by_hand", "message"),
    [
        (LocalSGD(4), False, r"20 backward passes without a step\(\) of the SGD given to attach\(\)"),
        (Gossip(), True, r"written after a backward pass, and not by .*: put a pass such as SAM's first one into"),
        (Gossip(), False, r"20 backward passes without a step\(\)"),
    ],
)
@on_ranks(2)
def test_passes_without_a_step_are_bounded(world, algorithm, by_hand, message):
    model = model_of()
    update = stepped_by_hand(model) if by_hand else nothing
    with pytest.raises(UsageError, match=message):
        train(world, algorithm, model, sgd(model), update, passes=24)


class Sharpness(torch.optim.Optimizer):
    """Takes the gradient at a point nearby; only the wrapped optimizer's ``step()`` is called, or its own."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.base_optimizer = sgd(model)

    @torch.no_grad()
    def move(self):
        self.before = [param.data.clone() for param in self.param_groups[0]["params"]]
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad, alpha=0.1)

    @torch.no_grad()
    def move_back(self):
        for param, before in zip(self.param_groups[0]["params"], self.before, strict=True):
            param.data = before
        self.base_optimizer.step()

    def step(self, closure):
        self.move()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.move_back()


def sharpen(world, algorithm, *, give_inner, in_two_calls=True):
    model = model_of()
    outer = Sharpness(model)
    replica = commrt.attach(model, outer.base_optimizer if give_inner else outer, algorithm, world=world)
    for step in range(8):
        with replica.no_sync():
            backward(model, step, world.rank)
        if in_two_calls:
            outer.move()
            outer.zero_grad()
            backward(model, step, world.rank)
            outer.move_back()
        else:
            outer.step(lambda step=step: backward(model, step, world.rank))
        outer.zero_grad()
    replica.drain()
    assert (replica.step, replica.disagreement() < 1e-3) == (8, True)


@for_each(("give_inner", "in_two_calls"), [(True, True), (False, False), (True, False)])
@for_each("algorithm", WAYS)
@on_ranks(2)
def test_an_optimizer_that_wraps_another_may_be_given_where_its_step_is_called(
    world, algorithm, give_inner, in_two_calls
):
    sharpen(world, algorithm, give_inner=give_inner, in_two_calls=in_two_calls)


@for_each("algorithm", WAYS)
@on_ranks(2)
def test_an_optimizer_of_which_only_the_inner_one_steps_is_refused(world, algorithm):
    with pytest.raises(UsageError, match=r"attach\(\) again with Sharpness\.base_optimizer, whose step\(\) is called"):
        sharpen(world, algorithm, give_inner=False)


class Unhooked(torch.optim.Optimizer):
    """Passes its steps on, as some wrappers do that never call ``Optimizer.__init__``."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


@for_each("algorithm", WAYS)
@on_ranks(2)
def test_an_optimizer_may_pass_its_steps_on(world, algorithm):
    model = model_of()
    inner = sgd(model)
    train(world, algorithm, model, inner, lambda _: Unhooked(inner).step())


@for_each("held", [lambda each: each, lambda each: [each], lambda each: {"a": each}])
def test_an_optimizer_is_found_in_an_attribute_of_another(held):
    inner, outer = sgd(model_of()), sgd(model_of())
    outer.holds = held(inner)
    assert wrapped_as(inner, [outer]) == "SGD.holds"


@for_each("algorithm", WAYS)
@on_ranks(1)
def test_an_optimizer_without_hooks_is_refused(world, algorithm):
    model = model_of()
    with pytest.raises(UsageError, match=r"the Unhooked has no hooks .* give the optimizer that it wraps"):
        commrt.attach(model, Unhooked(sgd(model)), algorithm, world=world)


@on_ranks(1)
def test_a_model_that_was_detached_or_dropped_knows_no_stranger(world):
    model = model_of()
    replica = commrt.attach(model, sgd(model), LocalSGD(4), world=world)
    replica.detach()
    backward(model, 0, world.rank)
    sgd(model).step()
