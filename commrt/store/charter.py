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
from commrt.store.hearsay import mapped, number, require, understood

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
    transport: str | None = None
    """The one that COMMRT_TRANSPORT insists on."""

    @staticmethod
    def found(store: Store) -> Charter | None:
        """The one that stands on `store`; raises `UsageError` if it stands no more."""
        if not store.check([KEY]):
            return None
        charter = understood(KEY, store.get(KEY), _read)
        if charter is None:
            raise UsageError(
                "this process comes to a world that has trained and ended: if it takes the place of a rank that is "
                "gone, it comes too late; to train anew, start all ranks again"
            )
        return charter

    def publish(self, store: Store) -> None:
        """Let it stand on `store`, by each of those who train; not again where it was withdrawn."""
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def withdraw(store: Store) -> None:
        """Nobody trains any more."""
        store.set(KEY, json.dumps(None))

    def require_place(self, rank: int, size: int, host: str | None, transport: str | None = None) -> None:
        """Raise unless a process on `host` that comes as `rank` of `size` can take that rank's place."""
        if transport != self.transport:
            raise DisagreementError(
                f"rank {rank} comes with COMMRT_TRANSPORT={transport or 'unset'}, and the others train with "
                f"{self.transport or 'unset'}: set it as they did"
            )
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


def _read(said: bytes) -> Charter | None:
    """None if it was withdrawn."""
    if json.loads(said) is None:
        return None
    charter = Charter(**mapped(said))
    number(charter.size, 1)
    number(charter.model)
    require(isinstance(charter.host, str | None) and isinstance(charter.transport, str | None))
    require(all(isinstance(text, str) for text in dict(charter.claim).values()))
    return charter
