# SPDX-License-Identifier: Apache-2.0
"""Peers' memory: buffers of the GPUs of one host, which all its ranks map and read where they lie.

Windows beside NCCL, which carries all other groups. In a window a hop is a signal, a wait and
kernels that read (`commrt.runtime.reading`). A rank signals to its peers how far it has come, by a
word in their memory, and waits for their signals, on the device. The counters lie on the device
too, so a graph repeats what calls do. A wait has a deadline. One that fails takes back what the
rank signalled, so that no peer reads what later kernels overwrite; after it, no kernel signals any
more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.dependencies import SignalWait
from commrt.errors import DeadlineExceeded, Place, TransportError, UsageError
from commrt.kernels.signal_wait import (
    ABORT,
    ENDED,
    FAILED,
    HOST_WORDS,
    MOST_RANKS,
    TIMEOUT_NS,
    SignalWaitPlan,
)
from commrt.store.addresses import host_identity
from commrt.store.client import clone_connection
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock
from commrt.transport.ipc import IpcMemory, MappedMemory
from commrt.transport.names import chosen_transport
from commrt.transport.nccl import CAPTURE, FREE_S, HELD_UP, READ_NOTICES_S, NcclTransport, Pending
from commrt.transport.nccl_communicator import Binding
from commrt.transport.protocol import Exchange, P2PGroup, Tag, Window

_log = logging.getLogger("commrt")
LINGER_S = 1.0
"""Time for the peers to unmap the memory of this rank before it is freed."""
BEGUN_KEPT = 4096
"""Programs whose tags are remembered: more than a GPU has queued."""
WHY_NOT = "slow, stopped, waiting for another rank, or running another program"


class PeersTransport(NcclTransport):
    """NCCL, and windows in memory that `mapped` shares with at least one other rank of this host.

    The error of a wait is raised as that of a group. All exchanges come from one thread at a
    time, on one stream.
    """

    kind = "peers' memory and nccl"

    def __init__(
        self,
        mapped: MappedMemory,
        store: Store,
        timeout_s: float,
        device: torch.device,
        binding: Binding | None = None,
        on_failure: Callable[[TransportError], None] | None = None,
    ) -> None:
        self._mapped = mapped
        self._memory = mapped.memory
        self._begun = deque([(0, CAPTURE)], BEGUN_KEPT)
        """(number, tag) of each program that was queued, the latest last."""
        self._captured: list[Sequence[int]] = []
        """For each program of the graph that is being captured, the ranks that it waits for."""
        self._host = self._memory.host_words(len(HOST_WORDS))
        self._words = self._host.numpy()
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._begins = {
            peer: torch.zeros(1, dtype=torch.int32, device=device) for peer in mapped.local_peers
        }
        """By peer, int32 [1]: see `SignalWaitPlan.counts`."""
        self._stalled: tuple[int, float] = 0, 0.0  # how many had ended, and since when no other has
        self._is_unmapped = False
        super().__init__(store, mapped.rank, mapped.members, timeout_s, device, binding, on_failure)

    def allocate_shared(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Return an allocation of its own; waits for the device."""
        self._require_device(device or self.device)
        return self._mapped.allocate(numel, dtype)

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        return [
            Window(peers, self.bind_signal_wait)
            for peers in self._mapped.share(buffers, self.timeout_s)
        ]

    def bind_signal_wait(
        self,
        signal_wait: SignalWait,
        hop: int,
        ranks: Sequence[int],
        *,
        first: bool = False,
        last: bool = False,
        checks_abort: bool = False,
    ) -> Exchange:
        """Prepare `signal_wait` with `ranks` once, to run it many times; `hop` is for errors.

        A program begins with its `first` one and ends with its `last` one, after which positions
        begin anew. One that `checks_abort` fails if an exchange before it, by other means, has been
        given up.
        """
        self._require_open(hop)
        begun = [ranks] if first else []
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
        launch = self._memory.signal_wait(plan)

        def run(tag: Tag) -> None:
            if self._capturing:
                self._captured += begun
            else:
                self._note(begun, tag, hop)
            launch()

        return run

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """Record one CUDA graph. NCCL is not in it if all messages of `group` are read."""
        self._captured = []
        return super().capture(work, group)

    def _replay_of(
        self, graph: torch.cuda.CUDAGraph, work: Callable[[], None], group: P2PGroup
    ) -> Exchange:
        captured = self._captured

        def replay(tag: Tag, _kept: object = work) -> None:
            self._note(captured, tag, group.hop)
            if group.reads:
                with self._in_use:
                    self._require_open(group.hop, tag)  # the watchdog may have freed it
                    graph.replay()
            else:
                self._queue(graph.replay, group, tag)

        return replay

    def _note(self, begun: Sequence[Sequence[int]], tag: Tag, hop: int) -> None:
        """Note that programs begin, given the ranks that each waits for; raises an error of those
        before them.
        """
        self._note_failure()
        self._require_open(hop, tag)
        for ranks in begun:
            self._words[TIMEOUT_NS] = int(min(self.timeout_s, 1e9) * 1e9)
            self._begun.append((self._begun[-1][0] + 1, tag))
            for peer in ranks:
                self._counts[peer] += 1

    def _note_failure(self) -> None:
        if (failure := self._failed_wait()) is not None:
            self._fail(failure)

    def _find_failure(self) -> TransportError | None:
        return self._failed_wait() or super()._find_failure() or self._stalled_wait()

    def _failed_wait(self) -> TransportError | None:
        if not (word := int(self._words[FAILED])):
            return None
        hop, peer = divmod(word - 1, MOST_RANKS)
        # programs end in order
        latest = self._begun[-1]
        ended = self._words[ENDED]
        _, tag = next((each for each in tuple(self._begun) if each[0] > ended), latest)
        what = f"rank {peer} did not come within {self.timeout_s:g} s, or gave up: {WHY_NOT}"
        return DeadlineExceeded(what, tag.place(self.rank, hop, peer))

    def _stalled_wait(self) -> TransportError | None:
        """Return the error for a peer that left without its part in what is queued; looked up if
        nothing moves.
        """
        (ended, since_s), (queued, latest) = self._stalled, self._begun[-1]
        if ended != self._words[ENDED] or ended == queued:
            self._stalled = int(self._words[ENDED]), clock.now_s()
        elif clock.now_s() - since_s > READ_NOTICES_S:
            begun = {peer: self._counts[peer] for peer in self._mapped.local_peers}
            return self._lost_peer(begun, latest, 0)
        return None

    def _give_up(self) -> None:
        self._words[ABORT] = 1  # no rank signals any more that what NCCL was to bring is ready
        super()._give_up()

    def wait(self) -> None:
        """Wait for what is queued on this thread's stream."""
        if self._failure is None:
            end = self._streams.record_event()
            self._wait_for(
                Pending(
                    P2PGroup([], []), self._begun[-1][1], clock.now_s(), self.timeout_s, {}, end
                )
            )
        self._note_failure()
        super().wait()

    def close(self) -> None:
        """Wait until the device has done all work, then unmap the memory of peers, even after an
        error.
        """
        if self._is_unmapped:
            return
        self._is_unmapped = True
        was_open = not self._closed
        is_idle = False
        try:
            start_call(self._memory.synchronize).result(self.timeout_s + 2 * FREE_S)
            is_idle = True
        except TimeoutError:
            self._fail(DeadlineExceeded(HELD_UP, Place(self.rank)))
        except RuntimeError as error:
            self._fail(
                TransportError(
                    f"the GPU failed ({error}): look at the output of all ranks", Place(self.rank)
                )
            )
        self._note_failure()
        try:
            super().close()
        finally:
            if is_idle:  # else kernels may still read what is mapped
                self._mapped.close(LINGER_S if was_open and self._failure is None else 0.0)

    def leave_to_parent(self) -> None:
        self._is_unmapped = True
        self._mapped.leave_to_parent()
        super().leave_to_parent()


def connect(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    *,
    on_failure: Callable[[TransportError], None],
) -> NcclTransport:
    """Connect a rank by NCCL, with windows in peers' memory where the ranks of its host can map it.
    Collective.

    Raises `UsageError` where they cannot and COMMRT_TRANSPORT asks for it.
    """
    host = host_identity() or f"none that rank {rank} can share"
    own = PrefixStore("peers", clone_connection(store))
    mapped = MappedMemory(own, rank, members, timeout_s, IpcMemory(device), host)
    own = PrefixStore("nccl", store)
    try:
        transport = (
            PeersTransport(mapped, own, timeout_s, device, on_failure=on_failure)
            if mapped.local_peers
            else NcclTransport(own, rank, members, timeout_s, device, on_failure=on_failure)
        )
    except BaseException:
        mapped.close(0.0)
        raise
    if mapped.refusal and chosen_transport() == "peers":
        transport.abort()
        what = (
            "COMMRT_TRANSPORT=peers, but GPUs cannot read each other's memory:"
            f" {mapped.refusal}. Unset it"
        )
        raise UsageError(what)
    if why := mapped.refusal:
        _log.info(
            "GPUs of this host exchange through NCCL, not through each other's memory: %s", why
        )
    return transport
