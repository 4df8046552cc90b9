# SPDX-License-Identifier: Apache-2.0
"""A loop of gossip or local SGD on one rank, as tests of them train, and what ranks must have in common at its end."""

import io
from functools import wraps

import torch
from cases import on_ranks
from gossip_models import local_step, model_of, same

import commrt
from commrt import Direct, Gossip
from commrt.local_sgd import HeavyBall, LocalSGD, Mix, Nesterov, SlowMomentum
from commrt.quantization import Int4

ALGORITHMS = [
    LocalSGD(3),
    LocalSGD(3, 2),
    LocalSGD(4, 4, outer=Nesterov(0.7, 0.6)),
    LocalSGD(4, 1, Mix(0.5), SlowMomentum(), fragments=3),
    LocalSGD(6, 3, fragments=3, wire=torch.bfloat16, warmup=2),
    LocalSGD(4, 2, outer=HeavyBall(), fragments=2, inner=Direct(), wire=Int4()),
    LocalSGD(3, 1, anchor="cpu", inner=commrt.Ring()),
]


GOSSIPING = commrt.local_sgd.noloco(3, inner=Gossip())


def ends_equal(ranks, **options):
    """As `on_ranks`; the tensors that the test returns must be equal on all ranks."""

    def decorate(test):
        found = {}

        @wraps(test)
        def keep(world, **fixtures):
            found[world.rank] = test(world=world, **fixtures)

        run = on_ranks(ranks, **options)(keep)

        @wraps(run)
        def all_ranks(**fixtures):
            run(**fixtures)
            unequal = [rank for rank in range(ranks) if not same(found[rank], found[0])]
            assert not unequal, f"ranks {unequal} did not end as rank 0"

        return all_ranks

    return decorate


class Loop:
    def __init__(self, world, algorithm, model=None, make=torch.optim.AdamW, lr=0.05, **options):
        self.world, self.model = world, model_of() if model is None else model
        self.optimizer = make(self.model.parameters(), lr=lr)
        options = {"bucket_cap_mb": 1e-4, **options}
        self.replica = commrt.attach(self.model, self.optimizer, algorithm, world=world, **options)
        self.step = 0

    def run(self, steps, then=lambda: None):
        for _ in range(steps):
            local_step(self.model, self.optimizer, self.step, self.world.rank)
            self.step += 1
            then()
        return self

    def state(self):
        """What a file holds after a save."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.replica)], file)
        return torch.load(io.BytesIO(file.getvalue()))

    def load(self, states):
        for part, state in zip((self.model, self.optimizer, self.replica), states, strict=True):
            part.load_state_dict(state)
        self.step = self.replica.step
        return self

    def anchors(self):
        return [self.agreed()["anchors", name] for name, _ in self.model.named_parameters()]

    def agreed(self):
        parts = self.replica.state_dict()["fragments"]
        return {
            (kind, name): tensor
            for part in parts
            for kind in ("anchors", "velocities")
            for name, tensor in part[kind].items()
        }
