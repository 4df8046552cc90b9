# SPDX-License-Identifier: Apache-2.0
"""Which optimizers step a model, and when a step ends: what is never exchanged is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import batch, model_of, params, same
from torch import nn

import commrt
from commrt import BackupWorkers, Gossip, Torus2D
from commrt.errors import UsageError
from commrt.local_sgd import LocalSGD
from commrt.testing.ranks import run_ranks

PASSES = 24
AFTER_STEPS = [Gossip(), LocalSGD(4), LocalSGD(4, 1)]
WAYS = [Gossip(), LocalSGD(4), Torus2D()]


def sgd(part):
    return torch.optim.SGD(part.parameters(), lr=0.01)


def backward(model, step, rank):
    model(batch(step, rank)).square().mean().backward()


def trained(ranks, algorithm, prepare, passes=PASSES):
    """Train; `prepare(model)` returns the optimizers to give, what to do after `attach`, and a rank's update."""

    def body(world):
        model = model_of()
        given, after, update = prepare(model)
        replica = commrt.attach(model, given, algorithm, world=world)
        after()
        for step in range(passes):
            backward(model, step, world.rank)
            update(step)
            model.zero_grad()
        assert replica.step >= passes - 2  # the latest steps may not have ended
        replica.drain()
        return replica.step, replica.stats().nbytes_sent > 0, replica.disagreement() < 1e-3

    return run_ranks(ranks, body)


def nothing(*_):
    pass


def never(_):
    return False


def rarely(step):
    return step % 10 == 9


def late(step):
    return step >= 12


@for_each(("algorithm", "when"), taking_turns(2 * AFTER_STEPS, [never, rarely, late, late, never, rarely]))
def test_an_optimizer_that_steps_rarely_holds_no_exchange_back(algorithm, when):
    def prepare(model):
        first, second = sgd(model[0]), sgd(model[2:])
        return [first, second], nothing, lambda step: (first.step(), when(step) and second.step())

    assert trained(2, algorithm, prepare) == [(PASSES, True, True)] * 2


@for_each("saved_at", [4, 5, 8])
def test_a_resumed_run_ends_its_steps_where_an_unbroken_one_does(saved_at):
    def body(world, stop):
        def attached():
            model = model_of()
            halves = [sgd(model[0]), sgd(model[2:])]
            return model, halves, commrt.attach(model, halves, LocalSGD(4), world=world)

        model, halves, replica = attached()
        for step in range(14):
            if step == stop:
                saved = copy.deepcopy([replica.state_dict(), *(each.state_dict() for each in (model, *halves))])
                replica.detach()
                model, halves, replica = attached()
                for owner, state in zip((model, *halves, replica), (*saved[1:], saved[0]), strict=True):
                    owner.load_state_dict(state)
            backward(model, step, world.rank)
            halves[0].step()
            if step % 7 == 6:
                halves[1].step()
            model.zero_grad()
        replica.drain()
        return params(model)

    unbroken, resumed = (run_ranks(2, partial(body, stop=stop)) for stop in (None, saved_at))
    assert all(map(same, unbroken, resumed))


@for_each("algorithm", [LocalSGD(2), Gossip()])
def test_the_critic_of_a_gan_steps_five_times_as_often(algorithm):
    def prepare(model):
        critic, generator = sgd(model[0]), sgd(model[2:])
        return [critic, generator], nothing, lambda step: (generator if step % 6 == 5 else critic).step()

    assert trained(2, algorithm, prepare) == [(PASSES, True, True)] * 2


def test_an_exchange_waits_for_all_optimizers_that_step_after_a_pass():
    def body(world):
        model, steps = model_of(), []
        halves = [sgd(model[:2]), sgd(model[2:])]
        replica = commrt.attach(model, halves, LocalSGD(1), world=world)
        for step in range(2):
            backward(model, step, world.rank)
            for half in halves:
                half.step()
                steps.append(replica.step)
        return steps, params(model)

    (steps, first), (_, second) = run_ranks(2, body)
    assert steps == [0, 1, 1, 2]
    assert same(first, second)


@for_each("compiled", [False, True])
def test_ranks_agree_on_steps_where_one_of_them_skips_some(compiled):
    """A compiled model calls no hooks, so the next step of the optimizer ends both."""

    def body(world):
        model = model_of()
        called = torch.compile(model, backend="eager") if compiled else model
        optimizer = sgd(model)
        replica = commrt.attach(called, optimizer, Gossip(), world=world)
        for step in range(8):
            called(batch(step, world.rank)).square().mean().backward()
            if not world.rank or step not in (2, 3, 5):
                optimizer.step()
            model.zero_grad()
        replica.drain()
        return replica.step, replica.disagreement() < 1e-6

    torch.compiler.reset()
    assert run_ranks(2, body) == [(8, True)] * 2


def made_anew(model):
    optimizers = [sgd(model)]

    def update(step):
        if step == 6:
            optimizers[0] = sgd(model)
        optimizers[0].step()

    return optimizers[:1], nothing, update


def for_a_part(model):
    given, other = sgd(model[0]), sgd(model[2:])
    return given, nothing, lambda _: (given.step(), other.step())


def moved_to_another(model):
    given, other = sgd(model), sgd(model[2:])
    return given, lambda: given.param_groups[0].update(params=[*model[0].parameters()]), lambda _: other.step()


def thawed_for_another(model):
    model[2:].requires_grad_(False)
    given, other = sgd(model[0]), sgd(model[2:])

    def exchange_frozen():
        model[0].requires_grad_(False)
        model[2:].requires_grad_(True)

    return given, exchange_frozen, lambda _: other.step()


def thawed_for_the_same(model):
    _, exchange_frozen, _ = thawed_for_another(model)
    given = sgd(model)
    return given, exchange_frozen, lambda _: given.step()


def given_more(model):
    given, exchange_frozen, _ = thawed_for_another(model)

    def more():
        exchange_frozen()
        given.add_param_group({"params": [*model[2:].parameters()]})

    return given, more, lambda _: given.step()


def given_a_new_head(model):
    given, heads = sgd(model), []

    def new_head():
        model[:4].requires_grad_(False)
        model[4] = nn.Linear(7, 3)
        heads.append(sgd(model[4]))

    return given, new_head, lambda _: heads[0].step()


STRANGERS = [
    (made_anew, r"SGD steps 0\.weight, and was not given to attach\(\): detach\(\), and attach\(\) again"),
    (for_a_part, r"SGD steps 2\.weight, and was not given"),
    (moved_to_another, r"SGD steps 2\.weight, and was not given"),
    (thawed_for_another, r"the optimizer steps 2\.weight, which was frozen"),
    (thawed_for_the_same, r"2\.weight was frozen and is not any more"),
    (given_more, r"2\.weight was frozen and is not any more"),
    (given_a_new_head, r"the optimizer steps 4\.weight, which was frozen, absent"),
]


@for_each(("stranger", "algorithm"), taking_turns(2 * STRANGERS, [*WAYS, BackupWorkers(backups=0)]))
def test_a_step_of_what_is_not_exchanged_is_refused(stranger, algorithm):
    prepare, message = stranger
    with pytest.raises(UsageError, match=message):
        trained(2, algorithm, prepare)


@for_each(("algorithm", "prepare"), [(Gossip(), thawed_for_another), (Torus2D(), given_a_new_head)])
def test_without_optimizers_only_steps_of_what_was_not_attached_are_refused(algorithm, prepare):
    with pytest.raises(UsageError, match="which was frozen, absent"):
        trained(2, algorithm, lambda model: (None, *prepare(model)[1:]))
    assert trained(2, algorithm, lambda model: (None, *made_anew(model)[1:])) == [(PASSES, True, True)] * 2


def by_hand(model):
    def update(_):
        for param in model.parameters():
            param.data -= 0.01 * param.grad

    return sgd(model), nothing, update


def not_at_all(model):
    return sgd(model), nothing, nothing


@for_each(
    ("algorithm", "prepare", "message"),
    [
        (LocalSGD(4), by_hand, r"20 backward passes without a step\(\) of the SGD given to attach\(\)"),
        (LocalSGD(4), not_at_all, r"20 backward passes without a step\(\)"),
        (Gossip(), by_hand, r"written after a backward pass, and not by a step of an optimizer"),
        (Gossip(), not_at_all, r"20 backward passes without a step\(\)"),
    ],
)
def test_passes_without_a_step_are_bounded(algorithm, prepare, message):
    with pytest.raises(UsageError, match=message):
        trained(2, algorithm, prepare)


def test_passes_that_accumulate_are_not_bounded():
    def body(world):
        model = model_of()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, LocalSGD(1), world=world)
        for step in range(30):
            with replica.no_sync() if step < 29 else nullcontext():
                backward(model, step, world.rank)
        optimizer.step()
        return replica.step

    assert run_ranks(2, body) == [1, 1]


# Optimizers that wrap others.


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


def sharpened(algorithm, *, give_inner, in_two_calls=True, first_is_synchronous=False, passes=PASSES):
    def body(world):
        model = model_of()
        outer = Sharpness(model)
        replica = commrt.attach(model, outer.base_optimizer if give_inner else outer, algorithm, world=world)
        for step in range(passes):
            with nullcontext() if first_is_synchronous else replica.no_sync():
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
        return replica.step, replica.disagreement() < 1e-3

    return run_ranks(2, body)


@for_each(("algorithm", "how"), product(WAYS, [(True, True), (False, False), (True, False)]))
def test_an_optimizer_that_wraps_another_may_be_given_where_its_step_is_called(algorithm, how):
    give_inner, in_two_calls = how
    assert sharpened(algorithm, give_inner=give_inner, in_two_calls=in_two_calls, passes=8) == [(8, True)] * 2


@for_each("algorithm", WAYS)
def test_an_optimizer_of_which_only_the_inner_one_steps_is_refused(algorithm):
    with pytest.raises(UsageError, match=r"attach\(\) again with Sharpness\.base_optimizer, whose step\(\) is called"):
        sharpened(algorithm, give_inner=False)


def test_a_pass_that_only_moves_weights_is_no_step_of_gossip():
    with pytest.raises(UsageError, match=r"SAM's first one into replica\.no_sync\(\)"):
        sharpened(Gossip(), give_inner=True, first_is_synchronous=True)


class Unhooked(torch.optim.Optimizer):
    """Passes its steps on, as some wrappers do that never call ``Optimizer.__init__``."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


@for_each("algorithm", WAYS)
def test_an_optimizer_without_hooks_is_refused_and_may_pass_steps_on(algorithm):
    with pytest.raises(UsageError, match=r"the Unhooked has no hooks .* give the optimizer that it wraps"):
        trained(1, algorithm, lambda model: (Unhooked(sgd(model)), nothing, nothing))

    def prepare(model):
        inner = sgd(model)
        return inner, nothing, lambda _: Unhooked(inner).step()

    assert trained(2, algorithm, prepare, passes=8) == [(8, True, True)] * 2


class Several(torch.optim.Optimizer):
    """Passes its steps on to a list of optimizers."""

    def __init__(self, optimizers):
        super().__init__([param for each in optimizers for param in each.param_groups[0]["params"]], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for each in self.optimizers:
            each.step(closure)


@for_each(("algorithm", "give_inner"), product(WAYS, [True, False]))
def test_an_optimizer_may_pass_its_steps_on_to_several(algorithm, give_inner):
    def prepare(model):
        inner = [sgd(model)]
        outer = Several(inner)
        return inner if give_inner else outer, nothing, lambda _: outer.step()

    assert trained(2, algorithm, prepare, passes=8) == [(8, True, True)] * 2


def steps_another_before(model):
    given, another = sgd(model), sgd(model)
    given.register_step_pre_hook(lambda *_: another.step() and None)
    return given, nothing, lambda _: given.step()


def steps_another_after(model):
    given, another = sgd(model), sgd(model)
    return given, lambda: given.register_step_post_hook(lambda *_: another.step()), lambda _: given.step()


@for_each(
    ("algorithm", "prepare"),
    [*product(WAYS, [steps_another_before]), *product([LocalSGD(4), Torus2D()], [steps_another_after])],
)
def test_a_hook_of_a_given_optimizer_may_step_another(algorithm, prepare):
    assert trained(2, algorithm, prepare, passes=8) == [(8, True, True)] * 2


def test_a_step_that_an_error_ended_is_not_under_way_after_the_next_one():
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of memory")

    def body(world):
        model = model_of()
        optimizer = Failing(model.parameters(), lr=0.1)
        commrt.attach(model, optimizer, Torus2D(), world=world)
        backward(model, 0, world.rank)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        with pytest.raises(UsageError, match="was not given to attach"):
            sgd(model).step()

    run_ranks(1, body)


@on_ranks(1)
def test_a_model_that_was_detached_or_dropped_knows_no_stranger(world):
    model = model_of()
    replica = commrt.attach(model, sgd(model), LocalSGD(4), world=world)
    replica.detach()
    backward(model, 0, world.rank)
    sgd(model).step()
