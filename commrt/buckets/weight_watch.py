# SPDX-License-Identifier: Apache-2.0
"""Compares the weights of ranks before each step, by digests that ride (``watch=True``).

It writes nothing but the digest among the riders. On the thread that averages, as `WeightWatch`
says; `require_equal` on any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from commrt.buckets.digest import Digest
from commrt.buckets.riders import Riders
from commrt.errors import DisagreementError


class WeightWatch:
    """Lets a digest ride with the first bucket of a step, and compares those that came back.

    In each step `begin`, the sum, `end`. Where the sum lies in host memory `compare` follows at
    once; on a GPU that would wait for it, so the `begin` of the next step compares.

    On the thread that averages the bucket: mostly the communication thread.
    """

    def __init__(self, riders: Riders) -> None:
        self._riders = riders
        # the latest step, and its members, whose digests came and were not compared
        self._came: tuple[int, Collection[int]] | None = None

    def begin(self, weights: Digest) -> None:
        """Compare what came last, if nobody has; then let a digest of `weights` ride, which are
        those before the step that begins.
        """
        self.compare()
        self._riders.add_digest(weights)

    def end(self, step: int, members: Collection[int]) -> None:
        """Note that digests of `members` came with the sum of `step`."""
        self._came = step, members

    def compare(self) -> None:
        """Raise `DisagreementError` if ranks that sent digests in the latest step had other weights
        than each other; does nothing for digests that were compared.
        """
        if self._came is None:
            return
        step, members = self._came
        self._came = None
        slots = self._riders.read()
        require_equal({rank: int(slots["digest"][rank]) for rank in members}, step)


def require_equal(digests: Mapping[int, int], step: int) -> None:
    """Raise `DisagreementError` if ranks have different `digests` of the weights before `step`."""
    (common, count), *others = Counter(digests.values()).most_common()
    if others:
        alone = [rank for rank, digest in digests.items() if digest != common]
        is_most = 2 * count > len(digests)
        who = (
            f"those of ranks {alone} differ from all others'"
            if is_most
            else f"their digests are {digests}"
        )
        raise DisagreementError(
            f"watch: before step {step} the ranks held different weights for the first time: {who}."
            " Bits were flipped, on a wire or in memory, or a rank alone has written weights or"
            " loaded a state: start again from a checkpoint, and look at the hosts of these ranks"
            " and of those that send to them"
        )
