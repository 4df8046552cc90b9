# SPDX-License-Identifier: Apache-2.0
"""Pass samples round a ring of ranks: each trains on all of them, and none reads them all.

Daily et al., "GossipGraD", 2018: while a rank computes on one batch, the batch that it used before
travels to the next rank. There it takes the place of the batch that the next rank sends on. The
communication thread exchanges, and tells the membership which steps have begun and which ranks are
lost; all else happens on the thread that trains. `shard` has the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from commrt.algorithms import halving_doubling
from commrt.algorithms.arguments import require_whole
from commrt.data.shard import Indexed, Shard
from commrt.errors import UsageError
from commrt.runtime.init import current
from commrt.runtime.membership import LOST
from commrt.runtime.prepared import Prepared
from commrt.runtime.world import World
from commrt.store.parsing import MALFORMED, parse_int, require
from commrt.threads.future import Future
from commrt.training.flat_buffer import FlatBuffer
from commrt.training.refusals import require_world
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag

TAG = Tag(0, "samples")


class _Buffers(NamedTuple):
    sent: FlatBuffer
    received: FlatBuffer


class _InFlight(NamedTuple):
    places: Tensor
    """Places of the samples that leave, where others come."""
    buffers: _Buffers
    answer: Future[int | None]


class RingShuffle:
    """Iterate over this rank's shard in batches; after each pass all samples move to the next rank.

    `samples` is a map-style dataset or a list, whose items are tensors, numbers, or tuples of
    these. Or it is a tuple of tensors [n, ...]. All samples stay in memory. Apply random
    augmentation to the batches that you get. All ranks need the same number of samples, of the same
    dtypes and shapes, and must take the same number of batches. After as many passes as there are
    ranks, each rank has seen every sample.

    ``for batch in ring`` is one pass. It yields tuples of tensors [batch_size, ...]; the last batch
    may be smaller. The order follows from `seed`, the rank and the pass. A batch is sent on the
    communication thread while you use the next one. So use the iterator on the training thread, and
    make the same collective calls on all ranks between two batches.

    With a model that gossips, the ring closes around a lost rank. The samples on that rank are
    lost; all others are kept if no rank was more than 8 batches ahead of another.

    Costs one batch sent per rank and step, and memory for two more batches. Raises `UsageError` for
    samples that cannot be sent, `DisagreementError` if ranks have different ones.
    """

    def __init__(
        self, samples: Indexed, batch_size: int, *, world: World | None = None, seed: int = 0
    ) -> None:
        require_world(world)
        require_whole("batch_size", batch_size)
        require_whole("seed", seed, 0)
        self._world = current() if world is None else world
        self._shard = Shard(samples)
        self._batch_size = batch_size
        if self._world.size > self._world.founders:
            raise UsageError(
                "RingShuffle with init(up_to=): a rank that comes has no samples; use commrt.Shares"
            )
        self._seed = seed
        self.passes = 0
        """The number of whole passes so far; written here only, on the thread that trains."""
        self._taken = 0  # batches of the running pass
        self._order = lru_cache(2)(self._order_of)
        # of the latest exchange; only the communication thread writes it later, and `_prepared`
        self._generation = self._world.membership.number
        # of the thread that trains
        self._buffers = Prepared[_Buffers](self._world, kept=1)
        self._prepared = Prepared[Exchange](self._world, kept=1)
        self._in_flight: _InFlight | None = None
        kinds = ", ".join(f"{field.dtype}{list(field.shape)}" for field in self._shard.fields)
        self._world.agree("RingShuffle", samples=kinds, batch_size=str(self._batch_size))

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return (len(self._shard) + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the remaining batches of the running pass."""
        while self._taken < len(self):  # a state may be loaded between two batches
            batch = self.passes * len(self) + self._taken
            self.drain()
            if batch > 0 and len(self._world.members) > 1:
                self._send(self._places(batch - 1))
            if self._taken == 0:
                self.drain()  # the last batch of the pass before may bring samples of this one
            places = self._places(batch)
            self._taken = self._taken + 1
            yield tuple(self._shard.batch(places))
        self.passes = self.passes + 1
        self._taken = 0

    def _places(self, batch: int) -> Tensor:
        passes, number = divmod(batch, len(self))
        return self._order(passes)[number * self._batch_size :][: self._batch_size]

    def _order_of(self, passes: int) -> Tensor:
        seed = np.random.SeedSequence([self._seed, self._world.rank, passes]).generate_state(
            1, np.uint64
        )
        generator = torch.Generator().manual_seed(int(seed[0] >> 1))
        return torch.randperm(len(self._shard), generator=generator, device="cpu")

    def drain(self) -> None:
        """Wait for the batch in flight, and put what has come into the shard; not collective."""
        if self._in_flight is None:
            return
        places, buffers, answer = self._in_flight
        self._in_flight = None
        completed = answer.result()
        if completed is None:
            return
        if completed > self._shard.replaced:
            self._shard.replace(places, buffers.received.parts)
        else:
            self._shard.take_back(completed)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a checkpoint needs, also the samples: they have moved since the start."""
        self.drain()
        return {
            "passes": self.passes,
            "taken": self._taken,
            "samples": [field.clone() for field in self._shard.fields],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved on this rank; all ranks load what was saved together."""
        try:
            passes = parse_int(state["passes"])
            taken = parse_int(state["taken"])
            samples = [*state["samples"]]
            require(taken <= len(self))
            kinds = [(field.dtype, field.shape) for field in samples]
        except MALFORMED as error:
            raise UsageError(
                "a state that no RingShuffle has saved: pass what state_dict() returned"
            ) from error
        if kinds != [(field.dtype, field.shape) for field in self._shard.fields]:
            raise UsageError(
                "a state of other samples: make the RingShuffle with the shard that it was saved"
                " with"
            )
        self.drain()
        self.passes = passes
        self._taken = taken
        self._shard.load(samples)

    def _send(self, places: Tensor) -> None:
        # A smaller batch repeats its last sample, so that one exchange is bound for all.
        most = min(self._batch_size, len(self._shard))
        places = torch.cat([places, places[-1:].expand(most - len(places))])
        buffers = self._buffers.known() or self._buffers.keep(self._new_buffers())
        buffers.sent.fill(self._shard.batch(places))
        if self._world.membership.needed:
            raise UsageError(
                "RingShuffle passes a batch on in each step, and with BackupWorkers ranks make"
                " different numbers of steps: let each rank draw from all samples, as torch's"
                " DistributedSampler does"
            )
        exchange = partial(self._exchange, buffers, self._shard.replaced)
        self._in_flight = _InFlight(places, buffers, self._world.comm_thread.submit(exchange))

    def _new_buffers(self) -> _Buffers:
        like = [field[: self._batch_size] for field in self._shard.fields]
        allocate = self._world.transport.allocate
        return _Buffers(FlatBuffer(like, allocate), FlatBuffer(like, allocate))

    def _bind(self, buffers: _Buffers) -> Exchange:
        members = self._world.members
        place = members.index(self._world.rank)
        to_next = P2PMessage(members[(place + 1) % len(members)], buffers.sent.flat)
        from_last = P2PMessage(members[place - 1], buffers.received.flat)
        return self._world.transport.bind(P2PGroup([to_next], [from_last]))

    def _exchange(self, buffers: _Buffers, completed: int) -> int | None:
        """Return how many batches all ranks have exchanged; None if unknown. On the comm thread.

        After a loss, the first exchange of the new generation is none: the ranks compare how many
        batches each has exchanged instead, and all go back to the lowest number. So no sample is
        lost but those of the lost rank.
        """
        membership = self._world.membership
        step = membership.next_step  # a batch is sent before the weights of its step
        membership.start_no_earlier(step + 1)
        if not membership.takes_part(step) or len(self._world.members) == 1:
            return None
        try:
            if membership.number != self._generation:
                return self._agree_on_lowest(completed)
            exchange = self._prepared.known(buffers)
            if exchange is None:
                exchange = self._prepared.keep(self._bind(buffers), buffers)
            exchange(TAG)
            if membership.is_elastic:
                self._world.transport.wait()
        except LOST as failure:
            membership.recover(failure)
            return None
        return completed + 1

    def _agree_on_lowest(self, completed: int) -> int:
        """Return the lowest `completed` of all members; exchange in this generation from now on."""
        members = tuple(self._world.members)
        counts = torch.zeros(self._world.size, dtype=torch.int64, device="cpu")
        counts[self._world.rank] = completed
        self._world.run_now(halving_doubling.all_reduce(len(members)), counts, TAG, members)
        self._generation = self._world.membership.number
        return int(counts[list(members)].min())
