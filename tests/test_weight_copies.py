# SPDX-License-Identifier: Apache-2.0
"""Optimizers that keep second copies of weights, such as fp32 masters of a bf16 model, wherever they keep them."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from late_ranks import MODEL, Loop, Trainee
from small_models import data, net
from torch.nn.functional import cross_entropy

import commrt
from commrt.errors import DisagreementError
from commrt.local_sgd import LocalSGD, Mix
from commrt.training.weight_copies import WeightCopies

WAYS = [commrt.Gossip(), LocalSGD(2), commrt.Gossip(staleness=1), LocalSGD(3, 2, Mix(0.5))]
KEPT = ["in state", "by parameter", "in an object's lists", "flat", "by id", "by an inner optimizer"]
KEPT += ["in arrays", "of matrices", "from step 3 on", "flat by group"]


class Masters(torch.optim.Optimizer):
    """SGD on copies of the parameters, in fp32 or wider, which it writes over them; the copies lie as `kept` says."""

    def __init__(self, params, lr, kept):
        super().__init__(params, {"lr": lr})
        self.kept, self.own = kept, [param for group in self.param_groups for param in group["params"]]
        self.steps, masters = 0, [self.copy(param) for param in self.own]
        if kept == "by parameter":
            self.masters = dict(zip(self.own, masters, strict=True))
        elif kept == "in an object's lists":
            self.stash = SimpleNamespace(groups=[masters[:1], masters[1:]])
        elif kept == "flat":
            self.flat = torch.cat([master.flatten() for master in masters])
        elif kept == "flat by group":
            self.flats = [torch.cat([master.flatten() for master in part]) for part in (masters[:2], masters[2:])]
        elif kept == "by id":
            self.masters = {id(param): master for param, master in zip(self.own, masters, strict=True)}
        elif kept == "by an inner optimizer":
            self.inner = torch.optim.SGD(masters, lr=lr)
        elif kept == "in arrays":
            self.kept_some = [master.numpy() for master in masters]
        elif kept == "of matrices":
            self.kept_some = [master for master in masters if master.dim() > 1]

    @staticmethod
    def copy(param):
        return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)

    def of_parameters(self):
        """The copies, in the order of the parameters, or a parameter that has none; some are made now."""
        if self.kept == "from step 3 on" and self.steps < 3:
            return [param.detach() for param in self.own]
        if self.kept in {"in arrays", "of matrices"}:
            left = map(torch.as_tensor, self.kept_some)
            return [next(left) if param.dim() > 1 or self.kept == "in arrays" else param.detach() for param in self.own]
        if self.kept in {"in state", "from step 3 on"}:
            for param in self.own:
                self.state[param].setdefault("master", self.copy(param))
            return [self.state[param]["master"] for param in self.own]
        if self.kept == "in an object's lists":
            return [master for group in self.stash.groups for master in group]
        if "flat" in self.kept:
            sizes = [param.numel() for param in self.own]
            cuts = [(self.flat, sizes)] if self.kept == "flat" else zip(self.flats, (sizes[:2], sizes[2:]), strict=True)
            parts = [part for flat, own in cuts for part in flat.split(own)]
            return [part.view(param.shape) for part, param in zip(parts, self.own, strict=True)]
        return self.inner.param_groups[0]["params"] if hasattr(self, "inner") else [*self.masters.values()]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for param, master in zip(self.own, self.of_parameters(), strict=True):
            if param.grad is not None:
                master.add_(param.grad, alpha=-self.param_groups[0]["lr"])
                param.copy_(master)


def run(model, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(rank, step)
        cross_entropy(model(x.to(model[0].weight.dtype) + rank), y).backward()
        optimizer.step()


@for_each(("kept", "algorithm"), taking_turns(KEPT, WAYS))
@on_ranks(2)
def test_a_step_that_learns_nothing_leaves_replicas_equal_as_consolidate_made_them(world, kept, algorithm):
    model = net().bfloat16()
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # as channels_last makes it
    optimizer = Masters(model.parameters(), 0.3, kept)
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    run(model, optimizer, world.rank, 5)
    replica.consolidate()
    optimizer.param_groups[0]["lr"] = 0.0
    run(model, optimizer, world.rank, 1)
    replica.drain()
    assert replica.replicas_equal()


@for_each(("kept", "algorithm"), taking_turns(KEPT, [commrt.Torus2D(), commrt.BackupWorkers(0)]))
@on_ranks(2)
def test_ranks_with_other_seeds_begin_with_the_copies_of_rank_0(world, kept, algorithm):
    model = net().bfloat16()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(world.rank)
    optimizer = Masters(model.parameters(), 0.3, kept)
    for master in optimizer.of_parameters() if kept not in {"in state", "from step 3 on"} else ():
        master.mul_(1 + 2.0**-12)  # less than bfloat16 can tell
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    run(model, optimizer, world.rank, 3)
    assert (replica.replicas_equal(), model[0].weight.abs().max() < 1) == (True, True)


@pytest.mark.parametrize("kept", ["in state", "by parameter", "flat"])
def test_a_late_rank_takes_the_copies_of_one_that_counted(kept):
    def body(loop, world):
        model = deepcopy(MODEL)
        rank = Trainee(loop, world, model, Masters(model.parameters(), 0.3, kept))
        rank.train()
        return rank.replica.replicas_equal()

    assert Loop().run(body) == [True] * 4


@on_ranks(2)
def test_copies_that_only_one_rank_has_are_named(world):
    model = net().bfloat16()
    optimizer = Masters(model.parameters(), 0.3, "by parameter")
    if world.rank == 1:
        optimizer.of_parameters()[0].add_(1.0)
    with pytest.raises(DisagreementError, match="about second copies of weights: '0 in the optimizers' against '4"):
        commrt.attach(model, optimizer, world=world)


@for_each(("algorithm", "share"), [(commrt.Gossip(), 0.0), (LocalSGD(2), 0.5)])
@on_ranks(2)
def test_weights_that_only_began_as_copies_are_left_alone(world, algorithm, share):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer.kept = [param.detach().clone() for param in model.parameters()]  # an average, or what draws weights back
    alone = [each.clone() for each in optimizer.kept]
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    for step in range(5):
        run(model, optimizer, world.rank + 10 * step, 1)
        for param, kept, expected in zip(model.parameters(), optimizer.kept, alone, strict=True):
            kept.lerp_(param.detach(), share)
            expected.lerp_(param.detach(), share)
    replica.consolidate()
    assert all(map(torch.equal, optimizer.kept, alone))


def test_two_copies_of_a_parameter_keep_their_own_values_when_another_ranks_are_taken():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.randn(8).bfloat16())], lr=0.1)
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.kept = [[param.detach().float() * (1 + 2.0**-12)], [param.detach().clone()]]
    copies, before = WeightCopies([optimizer]), deepcopy(optimizer.kept)
    copies.find()
    copies.load_state_dict(copies.state_dict())
    assert (len(copies.found), str(optimizer.kept)) == (2, str(before))


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "Rprop", "LBFGS", "NAdam"])
def test_no_state_of_torchs_optimizers_is_taken_for_a_copy(kind):
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.LayerNorm(3))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0 if kind != "LBFGS" else 1e-30)
    copies = WeightCopies([optimizer])
    for _ in range(3):
        model(torch.ones(2, 6)).sum().mul(0.0).backward()
        optimizer.step(lambda: torch.zeros(()))
        copies.find()
    assert copies.found == {}
