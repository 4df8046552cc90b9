# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process that do what a test tells them, call by call, each on a thread of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from threading import Event

import torch
from torch import nn
from transports import over_shared

import commrt
from commrt.errors import Evicted, Place, TransportClosed
from commrt.runtime.connection import ReconnectOptions
from commrt.store.launcher import LOOPBACK
from commrt.store.world_config import WorldConfig
from commrt.testing.ranks import local_worlds
from commrt.transport.null import NullTransport


class Branches(nn.Module):
    """A layer that each pass uses, two that only some do, and a buffer that counts what ranks have alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 5)])
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, heads):
        self.seen += (x > 0).sum()
        hidden = torch.tanh(self.first(x))
        return [hidden, *(self.heads[i](hidden) for i in heads)]


def loss_of(model, rank, number, heads):
    """What a rank learns in its pass `number`, by the `heads` that it uses then."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)
    return sum(part.square().mean() for part in model(x, heads))


def made(optimizers):
    """A model, and the optimizers that share it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches().double()
    parts = [model] if optimizers == 1 else [model.first, model.heads]
    return model, [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]


def left_since(before):
    """Threads that have begun since and do not end, but for those that wait for the next call of a store."""
    begun = [each for each in {*threading.enumerate()} - before if each.name != "commrt-store-call"]
    for thread in begun:
        thread.join(10)
    return [each for each in begun if each.is_alive()]


class Saved:
    """The states of some owners, as a checkpoint would hold them."""

    def __init__(self, *owners):
        self._states = [deepcopy(owner.state_dict()) for owner in owners]

    def load(self, *owners):
        for owner, state in zip(owners, self._states, strict=True):
            owner.load_state_dict(deepcopy(state))


@dataclass
class Rank:
    """What one thread trains."""

    world: commrt.World
    model: nn.Module
    optimizers: list
    replica: commrt.Replica = None
    saved: Saved = None

    def close(self):
        self.world.close()

    def detach(self):
        self.replica.detach()

    def kill(self):
        """Let the others find it gone, without a word; on any of its threads."""
        self.world.membership.member.close()
        self.world.transport.abort()

    def die(self):
        """At a hop, after others have done what they can: as `kill`, and nothing of this rank goes on."""
        Event().wait(0.05)
        self.kill()
        raise Evicted("killed", Place(), 0, None)  # the error after which a rank writes nothing on the store

    def attach(self, algorithm, **options):
        self.replica = commrt.attach(
            self.model, self.optimizers, algorithm, world=self.world, bucket_cap_mb=1e-4, **options
        )

    def backward(self, passes, weights=None):
        """Some passes, of which the last one averages; a rank without any takes part."""
        for place, (number, heads) in enumerate(passes):
            loss = loss_of(self.model, self.world.rank, number, heads)
            if weights is not None:
                loss = self.replica.weigh(loss, weights[place])
            if place < len(passes) - 1:
                with self.replica.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if not passes:
            self.replica.average()

    def accumulate(self, passes):
        with self.replica.no_sync():
            self.backward(passes)

    def save(self):
        self.saved = Saved(self.replica, self.model, *self.optimizers)

    def load(self):
        self.saved.load(self.replica, self.model, *self.optimizers)

    def join(self, steps):
        """Train so many steps of one pass each, while others may make more."""
        with self.replica.join():
            for each in steps:
                self.backward([each])
                for optimizer in self.optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()


def go_on():
    """What a rank does before most hops."""


NEVER = iter(()), object


class Crew:
    """So many ranks, whose models share `optimizers`, connected in memory; `shared`: as processes of a host are."""

    def __init__(self, ranks, optimizers, *, shared=False, timeout_s=20.0):
        self._before = {*threading.enumerate()}
        self._at_hop = [NEVER] * ranks
        self._optimizers = optimizers
        worlds = local_worlds(ranks, timeout_s, self._counted, over_shared if shared else None)
        self.ranks = [Rank(world, *made(optimizers)) for world in worlds]
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        self.gone = []

    def _counted(self, transport):
        bind = transport.bind

        def bind_counted(group):
            run = bind(group)

            def run_counted(tag):
                hops, kind = self._at_hop[transport.rank]
                if isinstance(tag.bucket, kind):
                    next(hops, go_on)()
                return run(tag)

            return run_counted

        transport.bind = bind_counted
        return transport

    def at_hop(self, place, left, act, kind=object):
        """Let a rank call `act` once, before the hop after `left` more; what this returns is at its end if it did.

        Only those count whose bucket is of this `kind`: a number, or the name (str) of what travels beside them.
        """
        hops = iter([*[go_on] * left, act])
        self._at_hop[self.ranks[place].world.rank] = hops, kind
        return hops

    def ends(self, call, *given):
        """Let each rank ``call(rank, *its part of each of given)``; return values or errors."""
        calls = zip(self._threads, self.ranks, *given, strict=True)
        futures = [thread.submit(call, *rest) for thread, *rest in calls]
        wait(futures)
        return [future.exception() or future.result() for future in futures]

    def do(self, call, *given):
        """As `ends`, and nothing was refused."""
        values = self.ends(call, *given)
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return values

    def lose(self, place, leave=Rank.kill):
        """Let a rank leave, and go on without it."""
        rank, thread = self.ranks.pop(place), self._threads.pop(place)
        self._at_hop[rank.world.rank] = NEVER
        thread.submit(leave, rank).result()
        self.gone.append((rank, thread))

    def replace(self):
        """Begin a process that will take the place of the only rank that is lost, once it attaches."""
        number = self.gone[-1][0].world.rank
        others = self.ranks[0].world
        connect = partial(others.reconnect_options.connect.func, number)
        null, store = NullTransport(number, range(others.founders), others.timeout_s), others.store
        options, config = ReconnectOptions(connect, LOOPBACK), WorldConfig.read(store)
        world = commrt.World(null, store, number, "threads", reconnect_options=options, config=config)
        rank, thread = Rank(world, *made(self._optimizers)), ThreadPoolExecutor(1)
        self.ranks.insert(number, rank)
        self._threads.insert(number, thread)

    def close(self):
        """End all, and leave no thread behind."""
        self.ends(Rank.close)
        for rank, thread in self.gone:
            rank.world.abort(TransportClosed("killed"))
            thread.submit(rank.world.close).result()
            thread.shutdown()
        for thread in self._threads:
            thread.shutdown()
        assert not left_since(self._before)
