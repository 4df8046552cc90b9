# SPDX-License-Identifier: Apache-2.0
"""The life of one rank's end of an NCCL communicator: how all ranks create one, and how it ends.

All ranks meet on the store before they call NCCL: a call that waits inside NCCL for a missing rank
has no deadline and cannot be interrupted.

A communicator ends once, by whoever comes first::

    created --- abort() ------------> aborted: what waits in it ends
        |------ destroy() ----------> destroyed: nothing was queued any more
        |------ collected ----------> aborted, by a thread of its own
        +------ leave_to_parent() --> never freed in a forked child: it is the parent's

NCCL may wait for other ranks in both calls. So another thread makes them, and is waited for at most
`FREE_S`. Graphs are freed first, as NCCL waits for them. `commrt.transport.group_watch` calls NCCL
meanwhile, holding `in_use`, and adds the graphs.
"""

from __future__ import annotations

import ctypes
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportError, UsageError
from commrt.store.disagreement import find_disagreement
from commrt.store.environment import variable
from commrt.store.parsing import typed
from commrt.store.records import gather
from commrt.threads.calls import start_call
from commrt.threads.future import Future
from commrt.threads.streams import Streams
from commrt.transport.nccl_binding import Binding, named

SHARES_GPUS = 23003
"""The first NCCL whose ranks can share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1."""
FREE_S = 10.0
"""Seconds to free a communicator: ranks of this host must come, and what is queued must end."""
BUSY_S = 0.2
"""Seconds that an abort waits for a call in progress: a first exchange may wait inside of it."""
OLD_CUPY = (
    "this CuPy is older than 14, whose ids of communicators differ: pip install 'cupy-cuda13x>=14'"
)

NcclCommunicator = Any
"""CuPy's object: used by one thread at a time, but for its `abort`."""
Graphs = weakref.WeakSet["torch.cuda.CUDAGraph"]


class Communicator:
    """A communicator, and what must not outlive it. Any thread may end it."""

    def __init__(self, nccl: NcclCommunicator) -> None:
        self.nccl = nccl
        self.in_use = threading.Lock()
        """Held on any thread during its calls, but for `abort`, or it could be freed meanwhile."""
        self.graphs = Graphs()
        """The CUDA graphs that use the communicator; `GroupWatch.capture` adds them."""
        self.ended = threading.Event()
        """Set when the end begins, on whichever thread, and when the object is collected."""
        self._collected = weakref.finalize(
            self, _abort_collected, self.ended, self.in_use, self.graphs, nccl
        )

    def begin_to_end(self) -> bool:
        """Return True for the first caller, who must then call `abort` or `destroy`."""
        self.ended.set()
        return self._collected.detach() is not None

    def abort(self) -> None:
        """End what is queued, and free the communicator."""
        _abort(self.in_use, self.graphs, self.nccl)

    def destroy(self) -> None:
        """Free the communicator, in which nothing is queued."""
        # if a rank of this host does not come, a thread waits on
        with self.in_use, suppress(TimeoutError):
            _reset(self.graphs)
            start_call(self.nccl.destroy).result(FREE_S)

    def leave_to_parent(self) -> None:
        """Never free it in a forked child: that would end the parent's.

        Takes no lock, as a thread that is not here may have held it, such as the watchdog that of
        its event.
        """
        if self._collected.detach() is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.nccl))


def _abort_collected(
    ended: threading.Event, in_use: threading.Lock, graphs: Graphs, nccl: NcclCommunicator
) -> Future[None] | None:
    """Abort a communicator that nobody ended, before CuPy frees it and waits for other ranks.

    Whoever happens to collect may hold what an abort waits for, so a thread of its own aborts. At
    the end of the interpreter nobody holds anything, and no thread can be started (Python 3.12).
    """
    ended.set()
    if threading.main_thread().is_alive():
        return start_call(lambda: _abort(in_use, graphs, nccl))
    _reset(graphs)
    nccl.abort()
    return None


def _abort(in_use: threading.Lock, graphs: Graphs, nccl: NcclCommunicator) -> None:
    """Abort while nobody uses the communicator but a call that waits inside, which this ends."""
    idle = in_use.acquire(timeout=BUSY_S)
    freed = start_call(nccl.abort)
    if not idle:
        idle = in_use.acquire(timeout=FREE_S)
    if idle:
        _reset(graphs)
    with suppress(TimeoutError):
        freed.result(FREE_S)
    if idle:
        in_use.release()


def _reset(graphs: Graphs) -> None:
    for graph in tuple(graphs):
        graph.reset()


def create(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    streams: Streams,
    binding: Binding,
) -> Communicator:
    """Return the communicator of `members`, on `device`.

    Raises `DeadlineExceeded` with the ranks that did not come, `DisagreementError` if they run
    different NCCLs, `UsageError` if two chose the same GPU, `TransportError` for an error of NCCL.
    """
    made = ""
    failure = None
    if rank == members[0]:
        try:
            made = binding.get_unique_id().hex()
        except Exception as error:  # the others must learn of it
            # ids of older CuPys are tuples, without `hex`
            failure = UsageError(OLD_CUPY) if isinstance(error, AttributeError) else error
    own = _RankInfo(binding.get_version(), _gpu(device), made)
    infos = gather(store, rank, members, own, timeout_s, _parse_info)
    claims = {peer: {"the version of NCCL": named(info.nccl)} for peer, info in infos.items()}
    mismatch = find_disagreement("connect", claims)
    if mismatch:
        raise mismatch
    _require_a_gpu_each(infos)
    if failure is not None:
        raise failure
    unique_id = bytes.fromhex(infos[members[0]].unique_id)
    if not unique_id:
        what = f"rank {members[0]} could not make a communicator: look at its output"
        raise PeerLost(what, Place(rank, members[0]))

    def construct() -> NcclCommunicator:
        streams.use()
        return binding.NcclCommunicator(len(members), unique_id, members.index(rank))

    try:
        return Communicator(start_call(construct).result(timeout_s))
    except TimeoutError as error:
        what = (
            f"all ranks came, but NCCL did not connect them within {timeout_s:g} s: run with"
            " NCCL_DEBUG=INFO"
        )
        raise DeadlineExceeded(what, Place(rank)) from error
    except RuntimeError as error:
        raise TransportError(
            f"NCCL made no communicator ({error}): run with NCCL_DEBUG=WARN", Place(rank)
        ) from error


class _RankInfo(NamedTuple):
    """What a rank tells the others before they create a communicator."""

    nccl: int
    """The version of NCCL."""
    gpu: str | None
    """Identifies its GPU among those of all hosts."""
    unique_id: str
    """The id of the communicator in hexadecimal, if the first rank says this."""


def _gpu(device: torch.device) -> str | None:
    """Return the GPU's name among all hosts; NCCL takes NCCL_HOSTID, where set, for the host."""
    if device.type != "cuda":
        return None
    return f"{variable('NCCL_HOSTID')} {torch.cuda.get_device_properties(device).uuid}"


def _parse_info(data: bytes) -> _RankInfo:
    info = _RankInfo(*typed(json.loads(data), int, str | None, str))
    bytes.fromhex(info.unique_id)  # raises
    return info


def _require_a_gpu_each(infos: Mapping[int, _RankInfo]) -> None:
    if (
        next(iter(infos.values())).nccl >= SHARES_GPUS
        and variable("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    ):
        return
    owners: dict[str, int] = {}
    for rank, info in infos.items():
        if info.gpu is None:
            continue
        owner = owners.setdefault(info.gpu, rank)
        if owner != rank:
            raise UsageError(
                f"ranks {owner} and {rank} chose the same GPU, {info.gpu}: move each model to its"
                " rank's world.device before it is attached"
            )
