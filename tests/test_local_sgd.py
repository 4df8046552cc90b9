# SPDX-License-Identifier: Apache-2.0
"""Local SGD: each published rule against a few lines of numpy in fp64, and what its settings refuse."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import for_each, taking_turns
from torch import nn

import commrt
from commrt import Gossip
from commrt.errors import UsageError
from commrt.local_sgd import (
    HeavyBall,
    LocalSGD,
    Mix,
    Nesterov,
    SlowMomentum,
    cocod,
    dasgd,
    diloco,
    noloco,
    streaming_diloco,
)
from commrt.testing.ranks import run_ranks

RANKS = [1, 2, 3, 4, 5]
STEPS, RATE, NUMEL = 13, 0.1, 6


def problem(ranks):
    """Return curvatures and minima, [ranks, numel] each, and where all ranks begin, [numel]."""
    random = np.random.default_rng(ranks)
    return random.uniform(0.5, 2.0, (ranks, NUMEL)), random.normal(size=(ranks, NUMEL)), random.normal(size=NUMEL)


class Bowl(nn.Module):
    """Quadratic loss with a minimum; one parameter per part."""

    def __init__(self, curvature, minimum, start, parts=1):
        super().__init__()
        self.parts = nn.ModuleList(nn.Module() for _ in range(parts))
        for part, values in zip(self.parts, torch.tensor(start).chunk(parts), strict=True):
            part.weight = nn.Parameter(values.clone())
        self.curvature, self.minimum = torch.tensor(curvature), torch.tensor(minimum)

    def weights(self):
        return torch.cat([part.weight for part in self.parts])

    def forward(self):
        return (self.curvature * (self.weights() - self.minimum).square()).sum() / 2


def trained(algorithm, ranks, parts=1, rate=lambda step: RATE, inner=torch.optim.SGD):
    """Return the weights and anchors of all ranks, [ranks, numel], after each step."""
    curvature, minimum, start = problem(ranks)

    def body(world):
        model = Bowl(curvature[world.rank], minimum[world.rank], start, parts)
        optimizer = inner(model.parameters(), lr=RATE)
        replica = commrt.attach(model, optimizer, algorithm, world=world)
        path = []
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            anchors = [part["anchors"] for part in replica.state_dict()["fragments"]]
            named = {name: tensor for part in anchors for name, tensor in part.items()}
            path.append((model.weights().detach(), torch.cat([named[name] for name, _ in model.named_parameters()])))
        return path

    paths = run_ranks(ranks, body)
    return [[torch.stack([path[step][which] for path in paths]).numpy() for which in (0, 1)] for step in range(STEPS)]


def require_equal(found, expected):
    for step, ((weights, anchors), (x, anchor)) in enumerate(zip(found, expected, strict=True), 1):
        require_close(weights, x, f"weights after step {step}")
        require_close(anchors, np.broadcast_to(anchor, x.shape), f"anchors after step {step}")


def require_close(found, expected, what):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=what)


def mean_of_all(snapshot, number):
    return snapshot.mean(0)


def by_hand(ranks, algorithm, outer=None, rate=lambda step: RATE, cuts=((slice(NUMEL), 0),), average=mean_of_all):
    """Yield weights and anchors after each step: local SGD in one list of what is in flight, by fragment.

    Fragment ``x[:, cut]`` leaves when a step is its offset after a period; ``average(snapshot, number)`` is of its
    `number`-th exchange.
    """
    h, c, start = problem(ranks)
    x = np.tile(start, (ranks, 1))
    anchor, velocity, in_flight = x.copy(), np.zeros_like(x), [None] * len(cuts)
    for step in range(1, STEPS + 1):
        x = x - rate(step) * h * (x - c)
        for part, (cut, offset) in enumerate(cuts):
            for event in ("merge", "leave", "merge"):  # the second merge is for a delay of 0
                if event == "leave" and step % algorithm.period == offset:
                    in_flight[part] = step, x[:, cut].copy()
                if event == "merge" and in_flight[part] and step == in_flight[part][0] + algorithm.delay:
                    (left, snapshot), in_flight[part] = in_flight[part], None
                    difference = anchor[:, cut] - average(snapshot, left // algorithm.period - 1)
                    move, velocity[:, cut] = (
                        (difference, 0) if outer is None else outer(difference, velocity[:, cut], rate(left))
                    )
                    anchor[:, cut] -= move
                    if isinstance(algorithm.merge, Mix):
                        share = algorithm.merge.local
                        x[:, cut] = share * x[:, cut] + (1 - share) * anchor[:, cut]
                    else:
                        x[:, cut] += anchor[:, cut] - snapshot
        yield x.copy(), anchor.copy()


LATE = [(period, delay) for period in (1, 4) for delay in range(period + 1)]


@for_each(("late", "ranks", "make"), taking_turns([*LATE, (4, 0)], RANKS, [partial(dasgd, local=0.25), LocalSGD]))
def test_a_late_average_is_mixed_in_as_of_dasgd_or_added_to_what_was_learned_since_the_weights_left(late, ranks, make):
    algorithm = make(*late)
    require_equal(trained(algorithm, ranks), by_hand(ranks, algorithm))


@for_each("delay", [0, 1, 2])
def test_what_optimizers_change_in_a_second_step_with_the_same_gradients_is_averaged_too(delay):
    def body(world):
        weights = nn.ParameterDict({"all": torch.zeros(3, dtype=torch.float64)})
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        replica = commrt.attach(weights, optimizer, LocalSGD(2, delay), world=world)
        for _ in range(4):
            optimizer.zero_grad()
            (weights["all"].sum() * world.rank).backward()
            optimizer.step()
            optimizer.step()
        replica.consolidate()
        return weights["all"].tolist()

    assert run_ranks(3, body) == [[-8.0] * 3] * 3  # eight steps by the mean of 0, 1 and 2


@for_each(("ranks", "period"), taking_turns(RANKS, [1, 2, 5]))
def test_cocod_is_its_rule(ranks, period):
    """As published: x <- mean of snapshots + x - own snapshot, then the next snapshot."""
    h, c, start = problem(ranks)
    x, found = np.tile(start, (ranks, 1)), trained(cocod(period), ranks)
    mean, snapshot = start, x.copy()
    for step in range(1, STEPS + 1):
        x = x - RATE * h * (x - c)
        if step % period == 0:
            x = mean + x - snapshot if step > period else x
            mean, snapshot = x.mean(0), x.copy()
        require_close(found[step - 1][0], x, f"step {step}")


@for_each("ranks", [1, 2, 5])
def test_diloco_is_adamw_inside_and_nesterov_outside(ranks):
    curvature, minimum, start = problem(ranks)
    models = [Bowl(curvature[rank], minimum[rank], start) for rank in range(ranks)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE) for model in models]
    anchor = nn.Parameter(torch.tensor(start))
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    expected = []
    for step in range(1, STEPS + 1):
        for model, optimizer in zip(models, inner, strict=True):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        if step % 4 == 0:
            anchor.grad = anchor.detach() - torch.stack([model.weights().detach() for model in models]).mean(0)
            outer.step()
            for model in models:
                model.parts[0].weight.data.copy_(anchor.data)
        weights = [model.weights().detach().numpy() for model in models]
        expected.append((np.stack(weights), anchor.detach().numpy().copy()))
    require_equal(trained(diloco(4), ranks, inner=torch.optim.AdamW), expected)


def heavy_ball(difference, velocity, rate):
    velocity = 0.3 * velocity + difference
    return 0.7 * velocity, velocity


def nesterov(difference, velocity, rate):
    velocity = 0.9 * velocity + difference
    return 0.7 * (difference + 0.9 * velocity), velocity


def slow_momentum(difference, velocity, rate):
    velocity = 0.5 * velocity + difference / rate
    return 0.8 * rate * velocity, velocity


OUTER = [(HeavyBall(), heavy_ball), (Nesterov(), nesterov), (SlowMomentum(0.8, 0.5), slow_momentum)]


@for_each(("case", "delay"), product(OUTER, [0, 1, 3]))
def test_the_anchor_follows_the_outer_optimizer(case, delay):
    def rate(step):
        return RATE / step  # SlowMo counts momentum in gradients

    rule, outer = case
    algorithm = LocalSGD(3, delay, outer=rule)
    require_equal(trained(algorithm, 2, rate=rate), by_hand(2, algorithm, outer, rate))


@for_each(("ranks", "delay"), taking_turns(RANKS, range(5)))
def test_streaming_is_diloco_of_each_fragment_at_its_own_time(ranks, delay):
    algorithm = streaming_diloco(2, 4, delay, outer=Nesterov(0.7, 0.9), wire=None)
    assert algorithm.merge == Mix(0.5)
    cuts = (slice(0, 3), 0), (slice(3, 6), 2)
    require_equal(trained(algorithm, ranks, parts=2), by_hand(ranks, algorithm, nesterov, cuts=cuts))


def mean_of_pairs(snapshot, number):
    """Of each rank, the mean with the one that it hears from."""
    found = snapshot.copy()
    for hop in Gossip().schedule(number, len(snapshot)).steps():
        for source, target in zip(hop.src, hop.dst, strict=True):
            found[target] = (snapshot[source] + snapshot[target]) / 2
    return found


@for_each(("ranks", "delay"), [*taking_turns(RANKS, [0, 2]), (5, 2)])
def test_noloco_averages_with_the_partner_of_its_period(ranks, delay):
    """As published: v <- momentum v + rate (the pair's mean - own anchor), anchor <- anchor + v."""
    algorithm = replace(noloco(3), delay=delay)
    require_equal(trained(algorithm, ranks), by_hand(ranks, algorithm, heavy_ball, average=mean_of_pairs))


def test_warmup_is_synchronous_training():
    h, c, start = problem(3)
    found = trained(LocalSGD(5, 2, outer=Nesterov(), warmup=8), 3)
    x = start
    for step in range(8):
        x = x - (RATE * h * (x - c)).mean(0)
        require_close(found[step][0], np.tile(x, (3, 1)), f"step {step}")
    assert not np.allclose(found[9][0][0], found[9][0][1])


RULES = [HeavyBall, Nesterov, SlowMomentum]


@for_each(("rule", "momentum"), product(RULES, [0.0, 0.5, 0.9]))
def test_the_bound_of_the_outer_rate_is_where_the_anchor_swings_ever_more(rule, momentum):
    with pytest.raises(UsageError, match=r"below (\S+), or") as refused:
        rule(10.0, momentum)
    bound = float(re.search(r"below (\S+), or", str(refused.value))[1])

    def left(rate):
        anchor, velocity = np.ones(1), np.zeros(1)
        object.__setattr__(own := rule(0.1, momentum), "rate", rate)
        for _ in range(200):
            own.step(anchor, anchor.copy(), velocity, 0.5)
        return abs(float(anchor[0]))

    assert left(0.97 * bound) < 0.9
    assert left(1.03 * bound) > 10


REFUSED = [
    (lambda: LocalSGD(delay=-1), "whole number from 0"),
    (lambda: LocalSGD(period=4, delay=5), r"delay=5 is longer than period=4: later exchanges would leave before"),
    (lambda: LocalSGD(period=4, fragments=5), "at most one may leave per step"),
    (lambda: LocalSGD(16, 16, outer=HeavyBall(0.7, 0.9)), r"unless the rate is below 0\.38"),
    (lambda: LocalSGD(16, 16, outer=Nesterov(1.2, 0.9)), r"unless the rate is below 1\.09"),
    (lambda: LocalSGD(merge="mix"), "Mix\\(0.5\\)"),
    (lambda: LocalSGD(outer=Nesterov), "has no step"),
    (lambda: LocalSGD(inner=commrt.BackupWorkers()), "all-reduce"),
    (lambda: LocalSGD(inner=SimpleNamespace(schedule=lambda: None)), "give it the signature"),
    (lambda: LocalSGD(inner=Gossip(staleness=1)), "leave staleness out"),
    (lambda: LocalSGD(anchor="gpu"), '"device" or "cpu"'),
    (lambda: LocalSGD(wire=torch.int8), r"wire=torch\.int8 cannot travel"),
    (lambda: LocalSGD(inner=Gossip(), wire="bf16"), "would be rounded"),
    (lambda: Mix(1.0), "below 1"),
    (lambda: Nesterov(momentum=1.0), "below 1"),
    (lambda: HeavyBall(momentum="1"), "give a number"),
]


@for_each(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@for_each(("rule", "momentum"), product(RULES, [0.3, 0.9]))
def test_where_averages_are_a_period_late_the_bound_of_a_rate_is_where_the_anchor_stops_coming_to_rest(rule, momentum):
    """Each period ends in the minimum, at 0; "correct" then adds to the anchor minus the weights that left."""

    def farthest(rate):
        outer = rule(rate, momentum)
        anchor, weights, velocity, sent = np.ones(1), np.ones(1), np.zeros(1), np.zeros(1)
        for _ in range(3000):
            outer.step(anchor, sent, velocity, 1.0)
            weights = anchor - weights
            sent = anchor - weights
        return abs(anchor[0])

    bound = rule(0.1, momentum).late_bound
    assert farthest(0.97 * bound) < 0.01
    assert farthest(1.03 * bound) > 100


def test_unwise_settings_are_said():
    assert "swing ever more widely" in LocalSGD(16, 12, outer=HeavyBall(0.7, 0.9)).unwise()[0]
    assert LocalSGD(16, 4, outer=Nesterov()).unwise(2000) == []
    assert "30 outer steps are few" in LocalSGD(16, outer=Nesterov()).unwise(480)[0]
    assert "throws away" in dasgd(16, 9, 0.0).unwise()[0]
    assert dasgd(16, 8, 0.0).unwise() == LocalSGD(16, 8, outer=HeavyBall(0.7, 0.9)).unwise() == []
