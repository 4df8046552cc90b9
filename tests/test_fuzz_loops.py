# SPDX-License-Identifier: Apache-2.0
"""Training loops that write themselves: drawn sequences of what users call, on threads as ranks.

One process in float64 says what is right. After each call all ranks have its weights and gradients, bit by bit those of
each other, or all were refused alike.
"""

import re
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Event

import pytest
import torch
from crew import Crew, Rank, Saved, loss_of, made
from fuzzing import MORE, THOROUGH
from gossip_models import sources
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from late_ranks import Progress

import commrt
from commrt.errors import CommrtError, UsageError
from commrt.local_sgd import LocalSGD
from commrt.training.step_clock import StepClock

CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # sums of float64 in different orders


def counted_steps(found):
    """Who counted in each step, as all say who counted there; their buffers were equal then."""
    used = {}
    for step, said in (each for mine in found for each in mine.items()):
        assert used.setdefault(step, said) == said, (step, said, used[step])
    return used


@dataclass
class Course(Progress):
    """How far ranks train; where they end may be said when some have begun already."""

    until: float = inf

    def goes_on_at(self, step):
        self.tell(step)
        return step < self.until

    def end_after(self, steps):
        with self.changed:
            self.until = self.passed + steps


def trained(rank, course, passes_of, *, is_late, stops):
    """Who counted and what buffers were, in the steps in which this rank counted; if late, it begins as others end."""
    used = {}
    replica = rank.replica
    replica.drain()
    if stops:
        replica.stop()
    if is_late:
        course.wait_for(course.until)
    while course.goes_on_at(step := replica.step):
        rank.model.zero_grad()
        rank.backward(passes_of(step))
        for optimizer in rank.optimizers:
            optimizer.step()
        if replica.last.counted:
            used[replica.last.step] = replica.last.members, int(rank.model.seen)
        replica.drain()
        _ = replica.stopping
    replica.consolidate()  # where late ranks catch up
    return used


def names(error, rank):
    """The message of an error names the rank, alone or among others."""
    return re.search(rf"(?:rank|ranks|peer) \[?(?:\d+, )*{rank}\b", str(error), re.IGNORECASE)


def is_zero(params):
    return all(param.grad is None or not param.grad.any() for param in params)


class Truth:
    """What one process knows: the gradients of all ranks, and which optimizers have used their mean."""

    def __init__(self, ranks, optimizers):
        self.model, self.optimizers = made(optimizers)
        self.size = ranks
        self.grads = [{} for _ in range(ranks)]
        self.seen = [0] * ranks
        self.step = 0
        self.held_back = False
        self.unused = set()

    @property
    def params(self):
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def add(self, rank, number, heads, weight=1.0):
        """One backward pass of a rank, as far as itself knows."""
        params = self.params
        self.model.seen.fill_(self.seen[rank])
        grads = torch.autograd.grad(
            weight * loss_of(self.model, rank, number, heads), [*params.values()], allow_unused=True
        )
        self.seen[rank] = int(self.model.seen)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                self.grads[rank][name] = self.grads[rank].get(name, 0) + grad

    def average(self, members=None, total=None):
        members = [*range(self.size)] if members is None else members
        for name in self.params:
            parts = [self.grads[rank][name] for rank in members if name in self.grads[rank]]
            if parts:
                mean = sum(parts) / (len(members) if total is None else total)
                for rank in members:
                    self.grads[rank][name] = mean.clone()
        for rank in members:
            self.seen[rank] = self.seen[members[0]]
        self.step += 1
        self.held_back = False
        self.unused = {*range(len(self.optimizers))}

    def all_optimizers(self):
        return self.optimizers

    def give(self, rank=0):
        """Let the model hold the gradients of a rank."""
        for name, param in self.model.named_parameters():
            param.grad = self.grads[rank].get(name)

    def step_by(self, which):
        """A step of an optimizer; False if it is refused."""
        self.give()
        if is_zero(self.params.values()):
            self.held_back = False
            self.unused = set()
        if self.held_back:
            return False
        if which not in self.unused:
            self.average()
            self.give()
        self.optimizers[which].step()
        self.unused.discard(which)
        return True

    def zero(self, which, *, to_none):
        names = {id(param): name for name, param in self.model.named_parameters()}
        for group in self.optimizers[which].param_groups:
            for param in group["params"]:
                for grads in self.grads:
                    name = names[id(param)]
                    if to_none:
                        grads.pop(name, None)
                    elif name in grads:
                        grads[name] = torch.zeros_like(grads[name])


HEADS = st.sets(st.sampled_from([0, 1])).map(sorted)
PASSES = st.lists(HEADS, min_size=1, max_size=2)
HOPS = st.tuples(st.integers(0, 30), st.just(object)) | st.tuples(st.integers(1, 3), st.just(str))
HIRED = st.fixed_dictionaries(
    {"ranks": st.integers(1, 4), "optimizers": st.integers(1, 2), "shared": st.sampled_from([False] * 3 + [True])}
)
WAYS = [
    {"algorithm": algorithm, "gradients": gradients}
    for algorithm in (commrt.Torus2D(), commrt.Ring(), commrt.HalvingDoubling(), commrt.Direct())
    for gradients in ("own", "views")
]


class Loops(RuleBasedStateMachine):
    """A crew in a loop, and what both sides of it do alike; `truth` has the `optimizers` of one process."""

    crew = None
    truth = None

    def hire(self, ranks, optimizers, *, shared=False):
        self.founders = ranks
        self.crew = Crew(ranks, optimizers, shared=shared)
        self.number = 0
        self.saved = None

    @property
    def size(self):
        return len(self.crew.ranks)

    @rule(place=st.integers(0, 3), hop=st.integers(0, 30))
    def stop_at_a_hop(self, place, hop):
        """One stands still for 0.1 s in what comes next, as the others find it."""
        self.crew.at_hop(place % self.size, hop, partial(Event().wait, 0.1))

    def drawn(self, data, *, least, most):
        """For each rank its passes: a number of their data, and the heads that they use."""
        own = st.lists(HEADS, min_size=least, max_size=most)
        passes = data.draw(st.lists(own, min_size=self.size, max_size=self.size))
        self.number += most
        return [[(self.number + i, heads) for i, heads in enumerate(each)] for each in passes]

    def chosen(self, which):
        """Places of optimizers: of one alone, that."""
        return sorted({each % len(self.crew.ranks[0].optimizers) for each in which})

    def all_optimizers(self):
        return [*self.truth.all_optimizers(), *(each for rank in self.crew.ranks for each in rank.optimizers)]

    @rule(lr=st.sampled_from([0.05, 0.1, 0.2]))
    def change_learning_rates(self, lr):
        for optimizer in self.all_optimizers():
            optimizer.param_groups[0]["lr"] = lr

    def compare(self, rank, said):
        """The weights of a rank are those of the model `said`."""
        for (name, param), wanted in zip(rank.model.named_parameters(), said.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, **CLOSE, msg=lambda text: f"{name}: {text}")  # noqa: B023

    def compare_all(self, said):
        """All ranks have the weights of the model `said`, and the same bits."""
        first = self.crew.ranks[0].model
        for rank in self.crew.ranks:
            self.compare(rank, said)
            for name, param in rank.model.named_parameters():
                assert torch.equal(param, first.get_parameter(name)), name

    def teardown(self):
        if self.crew is not None:
            self.crew.close()


class Synchronous(Loops):
    """All-reduces: replicas are equal, and are the one process. Two models of a world take turns, call by call."""

    @initialize(hired=HIRED, way=st.sampled_from(WAYS), watch=st.booleans(), two=st.booleans())
    def begin(self, hired, way, watch, two):
        self.begin_again = partial(self.begin, hired, way, watch, two)
        self.other = None
        self.truth = Truth(hired["ranks"], hired["optimizers"])
        self.hire(**hired)
        self.attach(way, watch)
        if two:
            ranks = [Rank(rank.world, *made(hired["optimizers"])) for rank in self.crew.ranks]
            self.other = ranks, Truth(hired["ranks"], hired["optimizers"]), None
            self.take_turns()
            self.attach(way, watch)

    def take_turns(self):
        if self.other:
            now = self.crew.ranks, self.truth, self.saved
            (self.crew.ranks, self.truth, self.saved), self.other = self.other, now

    @precondition(lambda self: self.size > 1)
    @rule(lost=st.integers(0, 3), passes=st.integers(0, 2), hop=st.none() | st.integers(0, 9))
    def lose_a_rank(self, lost, passes, hop):
        """One leaves in the middle of its loop, or of a hop; the others learn who. Then all begin again.

        In a hop one may be named who left as it could not go on without that one.
        """
        lost %= self.size
        strike = () if hop is None else self.crew.at_hop(lost, hop, self.crew.ranks[lost].world.transport.abort)

        def body(rank):
            if rank.world.rank != lost or hop is not None:
                rank.backward([(self.number, [0])] * passes)
            if rank.world.rank == lost:
                rank.world.close()
            elif hop is not None:  # it may have had all that it needed
                rank.replica.average()

        ends = self.crew.ends(body)
        if not [*strike]:
            for rank, error in enumerate(ends):
                assert rank == lost or isinstance(error, CommrtError), (rank, error)
                assert rank == lost or names(error, lost) or (hop is not None and error.place.peer is not None), str(
                    error
                )
        self.crew.close()
        self.begin_again()

    @precondition(lambda self: self.size > 1)
    @rule(odd=st.integers(0, 3))
    def differ(self, odd):
        """One alone changes a learning rate, which all find; by eight bits, so perhaps only in a later step."""
        self.crew.ranks[odd % self.size].optimizers[0].param_groups[0]["lr"] += 1
        ends = self.crew.ends(lambda rank: [rank.backward([(self.number, [0])]) for _ in range(3)])
        assert all(isinstance(end, CommrtError) for end in ends), ends
        self.crew.close()
        self.begin_again()

    def attach(self, way, watch):
        self.crew.do(lambda rank: rank.attach(watch=watch, **way))
        self.truth.step = 0
        self.truth.held_back = False
        self.truth.unused = set()
        self.truth.stopping = ()
        self.truth.seen = [self.truth.seen[0]] * self.truth.size

    @rule(data=st.data(), riding=st.booleans())
    def backward(self, data, riding):
        passes = self.drawn(data, least=0, most=3)
        skips, stops = [data.draw(st.sets(st.sampled_from(range(self.size)))) if riding else set() for _ in "ab"]

        def body(rank, own):
            mine = rank.world.rank
            if riding:
                rank.replica.ride(mine=mine, number=self.number)
            if mine in skips:
                rank.replica.skip()
            if mine in stops:
                rank.replica.stop()
            rank.backward(own)
            if not riding:
                return None
            rode = rank.replica.rode
            told = [{**rode[name].by_rank} for name in ("mine", "number")]
            return told, rank.replica.skipping, rank.replica.stopping

        ends = self.crew.do(body, passes)
        for rank, own in enumerate(passes):
            for number, heads in own:
                self.truth.add(rank, number, heads)
        self.truth.average()
        if riding:
            rode = [dict.fromkeys(range(self.size), number) for number in (0, self.number)]
            rode[0] = {rank: rank for rank in range(self.size)}
            self.truth.stopping = self.truth.stopping or tuple(sorted(stops))
            assert ends == [(rode, tuple(sorted(skips)), self.truth.stopping)] * self.size

    @rule(data=st.data())
    def accumulate(self, data):
        passes = self.drawn(data, least=1, most=1)
        self.crew.do(Rank.accumulate, passes)
        for rank, ((number, heads),) in enumerate(passes):
            self.truth.add(rank, number, heads)
        self.truth.held_back = True

    @precondition(lambda self: self.other)
    @rule(data=st.data(), holds_back=st.booleans())
    def step_after_the_other(self, data, holds_back):
        """Between a pass of one model and its step the other one makes a whole step."""
        self.accumulate(data) if holds_back else self.backward(data, riding=False)
        self.take_turns()
        self.backward(data, riding=False)
        self.step({0, 1})
        self.take_turns()
        self.step({0, 1})

    @rule(which=st.sets(st.sampled_from([0, 1]), min_size=1))
    def step(self, which):
        for i in self.chosen(which):
            left = {any(grad.any() for grad in own.values()) for own in self.truth.grads}
            if self.truth.held_back and len(left) == 2:
                return  # who has nothing left would wait for those that refuse
            ends = self.crew.ends(lambda rank: rank.optimizers[i].step())  # noqa: B023  # called here
            if self.truth.step_by(i):
                assert ends == [None] * self.size
            else:
                assert all(isinstance(end, UsageError) for end in ends), ends

    @rule(which=st.sets(st.sampled_from([0, 1]), min_size=1), to_none=st.booleans())
    def zero_grad(self, which, to_none):
        for i in self.chosen(which):
            self.crew.do(lambda rank: rank.optimizers[i].zero_grad(set_to_none=to_none))  # noqa: B023
            self.truth.zero(i, to_none=to_none)

    def zero_all(self):
        self.zero_grad({0, 1}, to_none=True)

    @rule()
    def average(self):
        self.crew.do(lambda rank: rank.replica.average())
        self.truth.average()

    @rule(data=st.data())
    def weighed_step(self, data):
        passes = self.drawn(data, least=0, most=2)
        weights = [[data.draw(st.sampled_from([0, 1, 3])) for _ in own] for own in passes]
        total = sum(map(sum, weights))
        if not total:
            return
        self.zero_all()
        self.crew.do(lambda rank, own, weights: rank.backward(own, weights), passes, weights)
        for rank, own in enumerate(passes):
            for (number, heads), weight in zip(own, weights[rank], strict=True):
                self.truth.add(rank, number, heads, weight)
        self.truth.average(total=total)
        self.all_is_equal()
        self.step({0, 1})
        self.zero_all()

    @rule()
    def save(self):
        self.crew.do(Rank.save)
        self.saved = Saved(self.truth.model, *self.truth.optimizers), self.truth.step, [*self.truth.seen]

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        self.zero_all()
        self.crew.do(Rank.load)
        states, self.truth.step, seen = self.saved
        self.truth.seen = [*seen]
        states.load(self.truth.model, *self.truth.optimizers)

    @rule(way=st.sampled_from(WAYS), watch=st.booleans(), frozen=st.booleans())
    def attach_anew(self, way, watch, frozen):
        self.zero_all()

        def detach(rank):
            rank.replica.detach()
            rank.model.heads[1].requires_grad_(not frozen)

        self.crew.do(detach)
        self.truth.model.heads[1].requires_grad_(not frozen)
        self.attach(way, watch)

    @rule(data=st.data())
    def join(self, data):
        steps = self.drawn(data, least=0, most=3)
        self.zero_all()
        self.crew.do(Rank.join, steps)
        members = [*range(self.size)]
        for place in range(max(map(len, steps))):
            members = [rank for rank, own in enumerate(steps) if place < len(own)]
            for rank in members:
                self.truth.add(rank, *steps[rank][place])
            self.truth.average(members)
            self.truth.give(members[0])
            for i, optimizer in enumerate(self.truth.optimizers):
                optimizer.step()
                self.truth.zero(i, to_none=True)
        self.truth.seen = [self.truth.seen[members[0]]] * self.size
        self.truth.unused = set()
        self.truth.stopping = self.truth.stopping[:1]

    @invariant()
    def is_as_said(self):
        if self.crew is not None:
            self.all_is_equal()
            self.take_turns()

    def all_is_equal(self):
        self.compare_all(self.truth.model)
        for place, rank in enumerate(self.crew.ranks):
            assert rank.replica.step == self.truth.step
            assert int(rank.model.seen) == self.truth.seen[place]
            grads = {name: param.grad for name, param in rank.model.named_parameters() if param.grad is not None}
            assert grads.keys() == self.truth.grads[place].keys()
            for name, grad in self.truth.grads[place].items():
                torch.testing.assert_close(grads[name], grad, **CLOSE)


def mixed(own, came):
    return [mine + (theirs - mine) / 2 for mine, theirs in zip(own, came, strict=True)]


class Alone:
    """What one process knows of ranks that train apart, and exchange weights when a step has ended."""

    def __init__(self, ranks, optimizers, algorithm):
        each = [made(optimizers) for _ in range(ranks)]
        self.models, self.optimizers = map(list, zip(*each, strict=True))
        self.members = [*range(ranks)]
        self.restart(algorithm)

    def lose(self, place):
        """Go on without the rank at this place; nothing is in flight."""
        for each in (self.models, self.optimizers, self.members):
            del each[place]
        if self.gossips:
            self.algorithm = self.algorithm.among(self.size)

    def adopt(self, place, model, own, came):
        """Take over the weights of a rank that noticed a loss: each is its `own`, or mixed with what `came`."""
        found = [param.detach().clone() for param in model.parameters()]
        for choices in zip(found, own, mixed(own, came), strict=True):
            assert any(torch.allclose(choices[0], choice, **CLOSE) for choice in choices[1:]), choices
        self.write(place, found)

    @property
    def size(self):
        return len(self.models)

    @property
    def gossips(self):
        return isinstance(self.algorithm, commrt.Gossip)

    def all_optimizers(self):
        return [each for own in self.optimizers for each in own]

    def weights(self):
        return [[param.detach().clone() for param in model.parameters()] for model in self.models]

    def mean(self):
        return [sum(parts) / self.size for parts in zip(*self.weights(), strict=True)]

    @torch.no_grad()
    def write(self, rank, weights):
        for param, new in zip(self.models[rank].parameters(), weights, strict=True):
            param.copy_(new)

    def restart(self, algorithm):
        """All ranks begin as rank 0 is."""
        self.algorithm = algorithm
        self.clock = StepClock(range(len(self.optimizers[0])))
        self.accumulated = False
        self.in_flight = None  # local SGD: the step and the weights with which a period ended
        self.anchor = self.weights()[0]
        for rank in range(1, self.size):
            self.write(rank, self.anchor)
            for own, first in zip(self.optimizers[rank], self.optimizers[0], strict=True):
                own.load_state_dict(deepcopy(first.state_dict()))

    def end_steps(self, ended):
        for step in ended:
            self.clock.end_step()
            if self.gossips:
                sent = self.weights()
                for rank, source in sources(self.algorithm, step, self.size).items():
                    self.write(rank, mixed(sent[rank], sent[source]))
            else:
                self.end_local_step()

    def end_local_step(self):
        local, step = self.algorithm, self.clock.step
        if self.in_flight and step - self.in_flight[0] >= local.delay:
            self.merge()
        if local.leaves(0, step):
            self.in_flight = step, self.weights()
            if not local.delay:
                self.merge()

    def merge(self):
        """The anchor becomes the mean of what was sent, to which each rank adds what it has learned since."""
        if self.in_flight is None:
            return
        (_, sent), self.in_flight = self.in_flight, None
        self.anchor = [sum(parts) / self.size for parts in zip(*sent, strict=True)]
        for rank, now in enumerate(self.weights()):
            parts = zip(self.anchor, now, sent[rank], strict=True)
            self.write(rank, [anchor + (own - left) for anchor, own, left in parts])

    def forward(self):
        """Gossip mixes before weights are used; local SGD sends them when an optimizer has stepped."""
        if self.gossips:
            self.end_steps(self.clock.on_weights_needed())

    def average(self):
        """End a step, or count what has accumulated as a pass, whose step ends after the optimizers'."""
        self.clock.on_pass(within_step=False)
        is_used_later = self.accumulated and any(param.grad is not None for param in self.models[0].parameters())
        self.accumulated = False
        if not is_used_later:
            self.end_steps(self.clock.on_weights_needed())

    def end_a_step(self):
        self.average()
        self.drain()

    def drain(self):
        self.end_steps(self.clock.on_weights_needed())
        self.merge()

    def consolidate(self):
        self.drain()
        self.anchor = self.mean()
        for rank in range(self.size):
            self.write(rank, self.anchor)

    def add(self, rank, number, heads):
        loss_of(self.models[rank], self.members[rank], number, heads).backward()

    def step_by(self, which):
        self.accumulated = False
        self.end_steps(self.clock.on_step_begin(which))
        for optimizers in self.optimizers:
            optimizers[which].step()
        self.end_steps(self.clock.on_step_end(which))


GONE = "its process is gone"  # as others say
LEAVING = {None: GONE, Rank.kill: GONE, Rank.close: "it closed its world", Rank.detach: "it detached its model"}
APART = [
    commrt.Gossip(),
    commrt.Gossip(rotate=False),
    LocalSGD(2),
    LocalSGD(3, delay=2),
    LocalSGD(2, delay=2, inner=commrt.Ring()),
]


class Apart(Loops):
    """Gossip and local SGD: ranks differ, but as one process says."""

    @initialize(hired=HIRED, algorithm=st.sampled_from(APART))
    def begin(self, hired, algorithm):
        self.truth = Alone(hired["ranks"], hired["optimizers"], algorithm)
        self.hire(**hired)
        self.attach(algorithm)

    @precondition(lambda self: self.size > 1)
    @rule(lost=st.integers(0, 3), hop=st.integers(0, 20), leave=st.sampled_from([*LEAVING]))
    def lose_a_rank(self, lost, hop, leave):
        """One leaves before a step, or is killed at a hop of it; the others go on."""
        lost %= self.size
        if self.size == self.founders:
            self.drain()
        else:
            self.consolidate()  # all have noticed who is lost
        truth, sent = self.truth, self.truth.weights()
        heard = sources(truth.algorithm, truth.clock.step, self.size) if truth.gossips else {}
        number, strike = truth.members[lost], self.crew.at_hop(lost, hop, self.crew.ranks[lost].die)
        if leave is not None:
            self.crew.lose(lost, leave)
        ends = self.crew.ends(lambda rank: [rank.replica.average(), rank.replica.drain()])
        assert sum(isinstance(end, Exception) for end in ends) <= (leave is None), ends
        if leave is None:
            if [*strike]:  # there were fewer hops
                truth.end_a_step()
                self.all_is_as_said()
                return
            self.crew.lose(lost)
        self.crew.do(lambda rank: rank.world.wait())  # a roll call that it has answered may still run
        truth.lose(lost)
        if self.saved:
            del self.saved[0][lost]
        if truth.gossips:
            truth.clock.on_pass(within_step=False)
            truth.clock.end_step()
            for place, rank in enumerate(self.crew.ranks):
                assert {loss.rank: loss.why for loss in rank.replica.lost}[number] == LEAVING[leave]
                before = place + (place >= lost)
                truth.adopt(place, rank.model, sent[before], sent[heard[before]])
        else:
            truth.end_a_step()
        self.all_is_as_said()

    def attach(self, algorithm):
        self.crew.do(lambda rank: rank.attach(algorithm))
        self.truth.restart(algorithm)

    @rule(data=st.data())
    def backward(self, data):
        passes = self.drawn(data, least=1, most=2)
        self.crew.do(Rank.backward, passes)
        self.truth.forward()
        for rank, own in enumerate(passes):
            for number, heads in own:
                self.truth.add(rank, number, heads)
        self.truth.clock.on_pass(within_step=False)
        self.truth.accumulated = False

    @rule(data=st.data())
    def accumulate(self, data):
        passes = [own[:1] for own in self.drawn(data, least=1, most=2)]
        self.crew.do(Rank.accumulate, passes)
        self.truth.forward()
        for rank, own in enumerate(passes):
            self.truth.add(rank, *own[0])
        self.truth.accumulated = True

    @rule(which=st.sets(st.sampled_from([0, 1]), min_size=1))
    def step(self, which):
        for i in self.chosen(which):
            self.crew.do(lambda rank: rank.optimizers[i].step())  # noqa: B023  # called here
            self.truth.step_by(i)

    @rule(which=st.sets(st.sampled_from([0, 1]), min_size=1), to_none=st.booleans())
    def zero_grad(self, which, to_none):
        for i in self.chosen(which):
            self.crew.do(lambda rank: rank.optimizers[i].zero_grad(set_to_none=to_none))  # noqa: B023
            for optimizers in self.truth.optimizers:
                optimizers[i].zero_grad(set_to_none=to_none)

    @rule()
    def average(self):
        self.crew.do(lambda rank: rank.replica.average())
        self.truth.average()

    @rule()
    def drain(self):
        self.crew.do(lambda rank: rank.replica.drain())
        self.truth.drain()
        self.all_is_as_said()

    @rule()
    def consolidate(self):
        self.crew.do(lambda rank: rank.replica.consolidate())
        self.truth.consolidate()
        self.all_is_as_said()

    @precondition(lambda self: self.size == self.founders)
    @rule(algorithm=st.sampled_from(APART))
    def attach_anew(self, algorithm):
        self.drain()
        self.crew.do(Rank.detach)
        for optimizer in self.all_optimizers():
            optimizer.state.clear()  # ranks may not have used the same layers, which attach refuses
        self.attach(algorithm)
        self.saved = None
        self.all_is_as_said()

    @rule()
    def save(self):
        self.drain()
        self.crew.do(Rank.save)
        states = [Saved(model, *own) for model, own in zip(self.truth.models, self.truth.optimizers, strict=True)]
        self.saved = states, self.truth.clock.step, self.truth.anchor

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        self.drain()
        self.zero_grad({0, 1}, to_none=True)
        self.crew.do(Rank.load)
        states, step, self.truth.anchor = self.saved
        self.truth.clock.restart(step)
        for state, model, own in zip(states, self.truth.models, self.truth.optimizers, strict=True):
            state.load(model, *own)
        self.all_is_as_said()

    @rule(data=st.data())
    def join(self, data):
        steps = self.drawn(data, least=0, most=2)
        self.zero_grad({0, 1}, to_none=True)
        self.crew.do(Rank.join, steps)
        truth = self.truth
        truth.forward()
        for place in range(max(map(len, steps))):
            for rank, own in enumerate(steps):
                if place < len(own):
                    truth.add(rank, *own[place])
                    for optimizer in truth.optimizers[rank]:
                        optimizer.step()
                        optimizer.zero_grad()
            truth.average()
        truth.consolidate()
        last = max(range(self.size), key=lambda rank: len(steps[rank]))
        for optimizers in truth.optimizers:
            for own, of_last in zip(optimizers, truth.optimizers[last], strict=True):
                own.load_state_dict(deepcopy(of_last.state_dict()))
        self.all_is_as_said()

    def all_is_as_said(self):
        for rank, model in zip(self.crew.ranks, self.truth.models, strict=True):
            assert rank.replica.step == self.truth.clock.step
            assert not self.truth.gossips or [*rank.world.members] == self.truth.members
            self.compare(rank, model)

    def teardown(self):
        if self.crew is not None:
            try:
                self.drain()
            finally:
                super().teardown()


class Quorum:
    """What one process knows of ranks whose gradients count in some steps; of these the first one gives its buffers."""

    def __init__(self, optimizers):
        self.model, self.optimizers = made(optimizers)
        self.step = 0

    def all_optimizers(self):
        return self.optimizers

    def advance(self, passes, members):
        """One step with the gradients that the `members` have for their `passes`."""
        sums = {}
        before = self.model.seen.clone()
        for rank in reversed(members):
            self.model.seen.copy_(before)
            self.model.zero_grad()
            for number, heads in passes:
                loss_of(self.model, rank, number, heads).backward()
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, 0) + param.grad
        for name, param in self.model.named_parameters():
            param.grad = sums[name] / len(members) if name in sums else None
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1


BACKUPS = [
    commrt.BackupWorkers(1),
    commrt.BackupWorkers(1, early=True),
    commrt.BackupWorkers(1, inner=commrt.Ring()),
    commrt.BackupWorkers(2),
]


class Backups(Loops):
    """Backup workers: whoever counts, all ranks end with the steps of one process with the gradients that counted."""

    @initialize(hired=HIRED, ranks=st.sampled_from([3, 5, 5, 6]), algorithm=st.sampled_from(BACKUPS))
    def begin(self, hired, ranks, algorithm):
        self.hire(**{**hired, "ranks": max(ranks, 2 * algorithm.backups + 1)})
        self.truth = Quorum(hired["optimizers"])
        self.attaches = 0
        self.attach(algorithm)

    def attach(self, algorithm):
        algorithm = algorithm if 2 * algorithm.backups < self.founders else BACKUPS[0]
        self.crew.do(lambda rank: rank.attach(algorithm))
        self.attaches += 1
        self.algorithm = algorithm
        self.truth.step = 0
        self.needed = self.founders - algorithm.backups

    @rule(steps=st.integers(1, 3), late=st.integers(0, 4), heads=PASSES, asker=st.integers(0, 9))
    def train(self, steps, late, heads, asker):
        """All ranks make so many steps; one may be late by all of them, one may ask all to stop."""
        late = self.crew.ranks[late % self.size] if self.size == self.founders else None
        self.train_on(Course(until=self.truth.step + steps), heads, late=late, asker=asker)

    def train_on(self, course, heads, late=None, dying=None, asker=None):
        first = self.number
        self.number += 100

        def passes_of(step):
            return [(first + 2 * step + i, each) for i, each in enumerate(heads)]

        def body(rank):
            if rank.replica is None:  # it takes the place of another
                try:
                    rank.attach(self.algorithm)
                finally:
                    course.end_after(3)
            try:
                return trained(rank, course, passes_of, is_late=rank is late, stops=rank.world.rank == asker)
            except CommrtError:
                if rank is not dying:
                    raise
                return {}

        used = counted_steps(self.crew.do(body))
        assert sorted(used) == [*range(self.truth.step, course.until)]
        for step in range(self.truth.step, course.until):
            members, seen = used[step]
            assert len(members) == self.needed
            self.truth.advance(passes_of(step), members)
            assert int(self.truth.model.seen) == seen

    @precondition(lambda self: self.size == self.founders)
    @rule(lost=st.just(1) | st.integers(0, 5), hop=HOPS, steps=st.integers(1, 3), heads=HEADS, replaced=st.booleans())
    def lose_a_rank(self, lost, hop, steps, heads, replaced):
        """One is killed at a hop of a step, or after all steps; in trees, 1 passes on what it gets."""
        lost %= self.size
        self.crew.at_hop(lost, hop[0], (dying := self.crew.ranks[lost]).die, hop[1])
        self.train_on(Course(until=self.truth.step + steps), [heads], dying=dying)
        self.crew.lose(lost)
        self.saved = None
        if replaced and self.attaches == 1:
            self.replace_a_rank(heads)

    @precondition(lambda self: self.size < self.founders and self.attaches == 1)
    @rule(heads=HEADS)
    def replace_a_rank(self, heads):
        self.crew.replace()
        self.train_on(Course(), [heads])
        assert any("a new process has the place" in rank.replica.report() for rank in self.crew.ranks)
        self.saved = None

    @rule()
    def consolidate(self):
        self.crew.do(lambda rank: rank.replica.consolidate())

    @rule()
    def save(self):
        self.crew.do(Rank.save)
        self.saved = Saved(self.truth.model, *self.truth.optimizers), self.truth.step

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        self.crew.do(Rank.load)
        state, self.truth.step = self.saved
        state.load(self.truth.model, *self.truth.optimizers)

    @precondition(lambda self: not self.crew.gone)
    @rule(algorithm=st.sampled_from(BACKUPS))
    def attach_anew(self, algorithm):
        self.crew.do(lambda rank: rank.replica.drain())
        self.crew.do(Rank.detach)
        self.attach(algorithm)

    @invariant()
    def all_is_equal(self):
        if self.crew is not None:
            self.crew.do(lambda rank: rank.replica.drain())
            assert {rank.replica.step for rank in self.crew.ranks} == {self.truth.step}
            assert {int(rank.model.seen) for rank in self.crew.ranks} == {int(self.truth.model.seen)}
            assert len({rank.replica.stopping for rank in self.crew.ranks}) == 1
            self.compare_all(self.truth.model)


SETTINGS = settings(
    max_examples=7 * MORE,
    stateful_step_count=12,
    deadline=None,
    derandomize=not THOROUGH,
    report_multiple_bugs=False,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a loop that hangs would be shrunk for hours
)
TestSynchronous = Synchronous.TestCase
TestSynchronous.settings = SETTINGS
TestApart = Apart.TestCase
TestApart.settings = SETTINGS
TestBackups = pytest.mark.slow(Backups.TestCase)
TestBackups.settings = SETTINGS
