# SPDX-License-Identifier: Apache-2.0
"""Peers' memory: buffers of the GPUs of one host, which all its ranks map and read where they lie.

Such a buffer is a window; NCCL carries all other groups. In a window a hop is a signal, a wait and
kernels that read (`commrt.runtime.reading`). A rank signals to its peers how far it has come, by a
word in their memory, and waits for their signals, on the device. The counters lie on the device
too, so a graph repeats what calls do. A wait has a deadline. One that fails takes back what the
rank signalled, so that no peer reads what later kernels overwrite; after it, no kernel signals any
more. Windows and NCCL's groups fail and end together, in one `GroupWatch`.

Called by the thread that exchanges, or later closes; `allocate`, `timeout_s` and `abort` by any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded, Place, TransportError, UsageError
from commrt.signal_waits import SignalWait
from commrt.store.addresses import host_identity
from commrt.store.client import clone_connection
from commrt.store.environment import variable
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock
from commrt.threads.forking import release_in_forked_child
from commrt.transport.group_watch import HELD_UP, Pending
from commrt.transport.ipc import IpcMemory
from commrt.transport.mapped_memory import MappedMemory
from commrt.transport.nccl import NcclTransport
from commrt.transport.nccl_binding import Binding
from commrt.transport.nccl_communicator import FREE_S
from commrt.transport.protocol import Exchange, P2PGroup, Tag, Transport, Window
from commrt.transport.signals import Signals

_log = logging.getLogger("commrt")
LINGER_S = 1.0
"""Time for the peers to unmap the memory of this rank before it is freed."""


class PeersTransport(Transport):
    """NCCL, and windows in memory that `mapped` shares with at least one other rank of this host.

    The error of a wait is raised as that of a group. All exchanges come from one thread at a time,
    on one stream. A window's programs count in the `counts` of NCCL's watch, and its failed waits
    `fail` that. Takes `mapped` over, and closes it.
    """

    kind = "peers' memory and nccl"
    can_move_receives = False

    def __init__(
        self,
        mapped: MappedMemory,
        store: Store,
        timeout_s: float,
        device: torch.device,
        binding: Binding | None = None,
        on_failure: Callable[[TransportError], None] | None = None,
    ) -> None:
        self.rank = mapped.rank
        self.members = mapped.members
        self._mapped = mapped
        self._signals = Signals(mapped, device)
        self._nccl = NcclTransport(
            store, self.rank, self.members, timeout_s, device, binding, on_failure
        )
        self._watch = self._nccl.watch
        self._watch.watch_too(self._signals)
        self._captured: list[Sequence[int]] = []
        """For each program of the graph that is being captured, the ranks that it waits for.

        `capture` empties it, and the exchanges that it runs add to it.
        """
        self._is_closed = False
        release_in_forked_child(self)

    @property
    def timeout_s(self) -> float:
        """Deadline of one group, and of one wait."""
        return self._watch.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._watch.timeout_s = seconds

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        return self._nccl.allocate(numel, dtype, device)

    def allocate_shared(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Return an allocation of its own; waits for the device."""
        self._nccl.require_device(device or self._nccl.device)
        return self._mapped.allocate(numel, dtype)

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        shared = self._mapped.share(buffers, self.timeout_s)
        return [Window(peers, self.bind_signal_wait) for peers in shared]

    def bind(self, group: P2PGroup) -> Exchange:
        return self._nccl.bind(group)

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

        A program begins with its `first` one and ends with its `last` one, after which positions,
        the numbers that ranks signal, begin anew. One that `checks_abort` fails if an exchange
        before it, by other means, has been given up.
        """
        self._watch.require_open(hop)
        begun = [ranks] if first else []
        launch = self._signals.bind(signal_wait, hop, ranks, last=last, checks_abort=checks_abort)

        def run(tag: Tag) -> None:
            if self._watch.is_capturing:
                self._captured += begun
            else:
                self._begin(begun, tag, hop)
            launch()

        return run

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """Record one CUDA graph. NCCL is not in it if all messages of `group` are read."""
        self._captured = []
        watch = self._watch
        graph = watch.capture(work, group)
        if graph is None:
            return None
        captured = self._captured

        def replay(tag: Tag, _kept: object = work) -> None:  # with all memory that the graph uses
            self._begin(captured, tag, group.hop)
            if group.reads:
                with watch.communicator.in_use:
                    watch.require_open(group.hop, tag)  # the watchdog may have freed it
                    graph.replay()
            else:
                watch.queue(graph.replay, group, tag)

        return replay

    def _begin(self, begun: Sequence[Sequence[int]], tag: Tag, hop: int) -> None:
        """Note that programs begin, given ranks that each waits for; raise what failed before."""
        self._note_failed_wait()
        self._watch.require_open(hop, tag)
        for ranks in begun:
            self._signals.begin(tag, self._watch.timeout_s)
            for peer in ranks:
                self._watch.counts[peer] += 1

    def _note_failed_wait(self) -> None:
        failure = self._signals.failed_wait(self._watch.timeout_s)
        if failure is not None:
            self._watch.fail(failure)

    def wait(self) -> None:
        """Wait for what is queued on this thread's stream."""
        watch = self._watch
        if watch.failure is None:
            end = watch.streams.record_event()
            latest = self._signals.latest_tag
            watch.wait_for(
                Pending(P2PGroup([], []), latest, clock.now_s(), watch.timeout_s, {}, end)
            )
        self._note_failed_wait()
        watch.wait()

    def close(self) -> None:
        """Wait until the device is idle, then unmap the memory of peers, even after an error."""
        if self._is_closed:
            return
        self._is_closed = True
        watch = self._watch
        was_open = not watch.is_closed
        is_idle = False
        try:
            start_call(self._mapped.memory.synchronize).result(self.timeout_s + 2 * FREE_S)
            is_idle = True
        except TimeoutError:
            watch.fail(DeadlineExceeded(HELD_UP, Place(self.rank)))
        except RuntimeError as error:
            what = f"the GPU failed ({error}): look at the output of all ranks"
            watch.fail(TransportError(what, Place(self.rank)))
        self._note_failed_wait()
        try:
            watch.close()
        finally:
            if is_idle:  # else kernels may still read what is mapped
                self._mapped.close(LINGER_S if was_open and watch.failure is None else 0.0)

    def abort(self) -> None:
        """End what is queued and free the communicator; callable from any thread."""
        self._watch.abort()

    def leave_to_parent(self) -> None:
        """Unmap nothing in a forked child, where `GroupWatch` leaves the rest."""
        self._is_closed = True
        self._mapped.leave_to_parent()


def connect(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    *,
    on_failure: Callable[[TransportError], None],
) -> Transport:
    """Connect a rank by NCCL, with windows where its host's ranks can map memory. Collective.

    Raises `UsageError` where they cannot and COMMRT_TRANSPORT asks for it.
    """
    host = host_identity() or f"none that rank {rank} can share"
    peers_store = PrefixStore("peers", clone_connection(store, timeout_s))
    mapped = MappedMemory(peers_store, rank, members, timeout_s, IpcMemory(device), host)
    nccl_store = PrefixStore("nccl", store)
    try:
        transport: Transport = (
            PeersTransport(mapped, nccl_store, timeout_s, device, on_failure=on_failure)
            if mapped.local_peers
            else NcclTransport(nccl_store, rank, members, timeout_s, device, on_failure=on_failure)
        )
    except BaseException:
        mapped.close(0.0)
        raise
    if mapped.refusal and variable("COMMRT_TRANSPORT") == "peers":
        transport.abort()
        what = (
            "COMMRT_TRANSPORT=peers, but GPUs cannot read each other's memory:"
            f" {mapped.refusal}. Unset it"
        )
        raise UsageError(what)
    if mapped.refusal:
        what = "GPUs of this host exchange through NCCL, not through each other's memory: %s"
        _log.info(what, mapped.refusal)
    return transport
