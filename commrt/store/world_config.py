# SPDX-License-Identifier: Apache-2.0
"""What a process must agree with to take a lost rank's place: the world and the model it trains.

The first ranks write it on the store. Requests wait on the caller's thread; nothing else is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch.distributed import Store

from commrt.errors import DisagreementError, UsageError
from commrt.store.disagreement import find_disagreement
from commrt.store.parsing import parse, parse_int, require

KEY = "world configuration"


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The world, and the model that it trains."""

    size: int
    """The number of ranks at the start."""
    places: int
    """For how many ranks there is a place."""
    host: str | None
    """The one host of all ranks, if they share memory; None if they use a network."""
    model: int
    """The number of the attached model: 0 for the first."""
    claim: Mapping[str, str]
    """What must be the same on every rank, by name."""
    transport: str | None = None
    """The one that COMMRT_TRANSPORT requires."""

    @staticmethod
    def read(store: Store) -> WorldConfig | None:
        """Return the configuration on `store` or None; raise `UsageError` if training has ended."""
        if not store.check([KEY]):
            return None
        config = parse(KEY, store.get(KEY), _parse_config)
        if config is None:
            raise UsageError(
                "this process comes to a world whose training has ended: a process that takes the"
                " place of a lost rank must start earlier; to train anew, start all ranks again"
            )
        return config

    def publish(self, store: Store) -> None:
        """Write this configuration to `store` unless one is there or was withdrawn.

        Every rank calls it.
        """
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def withdraw(store: Store) -> None:
        """Record that training has ended."""
        store.set(KEY, json.dumps(None))

    def require_place(
        self, rank: int, size: int, places: int, host: str | None, transport: str | None = None
    ) -> None:
        """Raise unless a process on `host` that starts as `rank` of `size` can take that place."""
        if transport != self.transport:
            raise DisagreementError(
                f"rank {rank} starts with COMMRT_TRANSPORT={transport or 'unset'}, and the others"
                f" train with {self.transport or 'unset'}: set it as they did"
            )
        if size != self.size:
            raise DisagreementError(
                f"rank {rank} starts with a world of {size} ranks, and {self.size} ranks train"
                " already: set the launcher's variables as they were for the process that it"
                " replaces"
            )
        if places != self.places:
            raise DisagreementError(
                f"rank {rank} starts with places for {places} ranks, and the others with"
                f" {self.places}: call init(up_to=) as they did"
            )
        if self.host not in {None, host}:
            raise UsageError(
                f"rank {rank} starts on another host than the other ranks, which run on one host"
                " through shared memory: start it there, or start all ranks with"
                " COMMRT_TRANSPORT=gloo"
            )

    def require_same(self, rank: int, model: int, claim: Mapping[str, str]) -> None:
        """Raise unless the model that `rank` attaches is the one that the others train."""
        if model != self.model:
            raise UsageError(
                f"the others train their attached model number {self.model}, and this process,"
                f" which takes the place of rank {rank}, attaches its number {model}: start all"
                " ranks again"
            )
        another = 0 if rank else 1
        topic = f"this process takes the place of rank {rank}"
        error = find_disagreement(topic, {another: self.claim, rank: claim})
        if error is not None:
            raise error


def _parse_config(text: bytes) -> WorldConfig | None:
    """Return None if it was withdrawn."""
    fields = json.loads(text)
    if fields is None:
        return None
    config = WorldConfig(**fields)
    parse_int(config.size, 1)
    parse_int(config.places, config.size)
    parse_int(config.model)
    require(isinstance(config.host, str | None) and isinstance(config.transport, str | None))
    require(all(isinstance(value, str) for value in dict(config.claim).values()))
    return config
