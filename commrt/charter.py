# SPDX-License-Identifier: Apache-2.0
"""What ranks that train agreed on when they began, for a process that takes the place of one that is gone.

While it stands on the store, who comes there with a rank's number is no first comer: nobody waits to connect with it,
and it must fit what is there already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch.distributed import Store

from commrt.errors import DisagreementError, UsageError

__all__ = ["Charter"]

KEY = "charter"


@dataclass(frozen=True, slots=True)
class Charter:
    """Of the model that a world trains."""

    size: int
    """Of the world."""
    host: str | None
    """The one host on which all are, if they see each other through its memory; None where they use a network."""
    model: int
    """The how many-th that was attached."""
    claim: Mapping[str, str]
    """What must be the same on every rank, by name."""

    @classmethod
    def found(cls, store: Store) -> Charter | None:
        """The one that stands on `store`."""
        return cls(**json.loads(store.get(KEY))) if store.check([KEY]) else None

    def publish(self, store: Store) -> None:
        """Let it stand on `store`."""
        store.set(KEY, json.dumps(asdict(self)))

    @staticmethod
    def withdraw(store: Store) -> None:
        """Nobody is waited for any more."""
        store.delete_key(KEY)

    def require_place(self, rank: int, size: int, host: str | None) -> None:
        """Raise unless a process on `host` that comes as `rank` of `size` can take that rank's place."""
        if size != self.size:
            raise DisagreementError(
                f"rank {rank} comes with a world of {size} ranks to one of {self.size} that trains already: set "
                "the launcher's variables as they were for the process whose place it takes"
            )
        if self.host not in {None, host}:
            raise UsageError(
                f"rank {rank} takes the place of a process that is gone, while the others train on one host, through "
                "its memory: start it there, or let all begin with COMMRT_TRANSPORT=gloo"
            )

    def require_same(self, rank: int, model: int, claim: Mapping[str, str]) -> None:
        """Raise unless what `rank` attaches is what the others train."""
        if model != self.model:
            raise UsageError(
                f"the others train the model that they attached as number {self.model}, and this process, which takes "
                f"the place of rank {rank}, comes to it as its number {model}: start all again"
            )
        for name in sorted(self.claim.keys() | claim.keys()):
            mine, theirs = claim.get(name, "nothing"), self.claim.get(name, "nothing")
            if mine != theirs:
                raise DisagreementError(
                    f"this process takes the place of rank {rank}, and differs from those who train about {name}: "
                    f"{mine!r:.200} against {theirs!r:.200}. Start it with the same program and options"
                )
