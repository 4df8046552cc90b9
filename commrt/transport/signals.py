# SPDX-License-Identifier: Apache-2.0
"""The signals and waits that a rank has queued on its GPU, in programs, and how they fail.

The thread that exchanges binds them and says when a program begins. The kernels count on the device
and write to words in host memory, where that thread and the watchdog of
`commrt.transport.group_watch` read what has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from commrt.errors import DeadlineExceeded, TransportError
from commrt.kernels.signal_wait import (
    ABORT,
    ENDED,
    FAILED,
    HOST_WORDS,
    MOST_RANKS,
    TIMEOUT_NS,
    SignalWaitPlan,
)
from commrt.signal_waits import SignalWait
from commrt.threads.deadline import clock
from commrt.transport.group_watch import CAPTURE, READ_NOTICES_S, GroupWatch
from commrt.transport.mapped_memory import MappedMemory
from commrt.transport.protocol import Tag

BEGUN_KEPT = 4096
"""Programs whose tags are remembered: more than a GPU has queued."""
WHY_NOT = "slow, stopped, waiting for another rank, or running another program"


class Signals:
    """Signals to the local peers of `mapped`, and waits for theirs: a transport's `DeviceWaits`.

    For the thread that exchanges: `bind`, `begin` and `latest_tag`. For the watchdog too:
    `failed_wait`. For it alone: `find_failure`. For any thread: `abort`.
    """

    def __init__(self, mapped: MappedMemory, device: torch.device) -> None:
        self._mapped = mapped
        self._host = mapped.memory.host_words(len(HOST_WORDS))
        self._words = self._host.numpy()
        """What kernels and this rank tell each other, by the numbers in `HOST_WORDS`."""
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        """See `SignalWaitPlan.state`."""
        self._begins = {
            peer: torch.zeros(1, dtype=torch.int32, device=device) for peer in mapped.local_peers
        }
        """By peer, int32 [1]: see `SignalWaitPlan.counts`."""
        self._begun = deque([(0, CAPTURE)], BEGUN_KEPT)
        """(number, tag) of each program that was queued, the latest last."""
        self._stalled = 0, 0.0
        """How many had ended, and since when no other has, as `find_failure` saw it."""

    def bind(
        self,
        signal_wait: SignalWait,
        hop: int,
        ranks: Sequence[int],
        *,
        last: bool,
        checks_abort: bool,
    ) -> Callable[[], None]:
        """Return what queues `signal_wait` each time; see `PeersTransport.bind_signal_wait`."""
        plan = SignalWaitPlan(
            [self._mapped.outbox(peer) for peer in ranks],
            [self._mapped.inbox(peer) for peer in ranks],
            [self._begins[peer] for peer in ranks],
            ranks,
            [signal_wait.needs.get(peer, 0) for peer in ranks],
            self._state,
            self._host,
            signal_wait.position,
            signal_wait.position if last else 0,
            hop,
            checks_abort,
        )
        return self._mapped.memory.signal_wait(plan)

    def begin(self, tag: Tag, timeout_s: float) -> None:
        """Note that a program is queued, each of whose waits may take `timeout_s`."""
        self._words[TIMEOUT_NS] = int(min(timeout_s, 1e9) * 1e9)
        self._begun.append((self._begun[-1][0] + 1, tag))

    @property
    def latest_tag(self) -> Tag:
        """The tag of the program that was queued last."""
        return self._begun[-1][1]

    def failed_wait(self, timeout_s: float) -> TransportError | None:
        """Return the error of a wait that ended in vain; `timeout_s` is its deadline."""
        word = int(self._words[FAILED])
        if not word:
            return None
        hop, peer = divmod(word - 1, MOST_RANKS)
        latest = self._begun[-1]
        ended = self._words[ENDED]
        # programs end in order
        _, tag = next((each for each in tuple(self._begun) if each[0] > ended), latest)
        what = f"timed out: rank {peer} did not come within {timeout_s:g} s, or gave up: {WHY_NOT}"
        return DeadlineExceeded(what, tag.place(self._mapped.rank, hop, peer))

    def find_failure(self, watch: GroupWatch) -> TransportError | None:
        """Return the error of a failed wait or a peer that left; let `watch` ask if nothing moves.

        Notes how many programs have ended.
        """
        failure = self.failed_wait(watch.timeout_s)
        if failure is not None:
            return failure
        ended, since_s = self._stalled
        queued, latest = self._begun[-1]
        if ended != self._words[ENDED] or ended == queued:
            self._stalled = int(self._words[ENDED]), clock.now_s()
        elif clock.now_s() - since_s > READ_NOTICES_S:
            begun = {peer: watch.counts[peer] for peer in self._mapped.local_peers}
            return watch.lost_peer(begun, latest, 0)
        return None

    def abort(self) -> None:
        """Fail this rank's waits; kernels that `checks_abort` do not signal any more.

        What NCCL was to bring before them is not there.
        """
        self._words[ABORT] = 1
